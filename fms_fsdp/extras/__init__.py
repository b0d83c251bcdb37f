"""Optional components. The function that uses one imports it, so a default run imports none."""
