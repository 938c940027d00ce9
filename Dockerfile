# A CUDA PyTorch image by default, whose torch is the one that pyproject.toml asks for; python:3.12-slim for a CPU.
ARG BASE_IMAGE=pytorch/pytorch:2.13.0-cuda13.0-cudnn9-runtime
FROM ${BASE_IMAGE}

# Another index for pip, such as a mirror or PyTorch's own of CPU builds.
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL

# On top of the base image's packages, so that its torch is used and not fetched again.
RUN python3 -m venv --without-pip --system-site-packages /opt/venv
# torchrun is the base image's and would start its workers with the base image's Python.
ENV PATH=/opt/venv/bin:$PATH PYTHON_EXEC=/opt/venv/bin/python

# The dependencies, in a layer that lasts until one of these two files changes.
WORKDIR /app
COPY pyproject.toml constraints.txt ./
# A secret `pip` is a pip.conf with an index's credentials, which stay out of the image.
RUN --mount=type=secret,id=pip,target=/etc/pip.conf,mode=0444 \
    python -c 'import tomllib; project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
        print(*project["dependencies"], *project["optional-dependencies"]["plots"], sep="\n")' > /tmp/requirements.txt \
    && python -m pip install --no-cache-dir --disable-pip-version-check -c constraints.txt -r /tmp/requirements.txt \
    && rm /tmp/requirements.txt

# The source: what .dockerignore lets through. Corpora and runs are mounted; without mounts they end with the container.
COPY . .
RUN mkdir -m 1777 data runs cache

# Any user will do (`docker run -u`): nothing but data/, runs/, cache/ (compiled functions) and /tmp is written.
# The commit is recorded in each run's run.json.
ARG COMMIT
ENV HOME=/tmp PYTHONUNBUFFERED=1 NUMBA_CACHE_DIR=/app/cache LM_COMMIT=${COMMIT}
USER 1000:1000

ENTRYPOINT ["python", "train.py"]
