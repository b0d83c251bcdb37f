"""Settings of the test processes, before torch is imported: threads that wait do not spin, so that tests may share two cores."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
