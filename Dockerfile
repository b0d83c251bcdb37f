# Adds the packages of this repository to a PyTorch image; the container mounts the repository.
# See docs/guides/clusters.md#containers.
#   docker build --tag fms-fsdp .
ARG IMAGE=pytorch/pytorch:latest
FROM ${IMAGE}
# Set IMAGE to a tag with torch 2.11 to 2.15; the installation keeps that torch.
ENV PIP_BREAK_SYSTEM_PACKAGES=1 PIP_NO_CACHE_DIR=1 PYTHON=python3 HOME=/tmp USER=trainer
COPY pyproject.toml /tmp/
RUN python3 -c "import tomllib; print(*tomllib.load(open('/tmp/pyproject.toml', 'rb'))['project']['dependencies'], sep='\n')" >/tmp/packages.txt \
    && python3 -m pip install --requirement /tmp/packages.txt
USER 1000:1000
WORKDIR /workspace
CMD ["bash", "scripts/train.sh"]
