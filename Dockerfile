# The images of the extender (also of console and webhook) and of the agent. To build both (docs/get-started/images.md):
#   make images BASE=python:3.12-slim@sha256:...
#
# The base image, PYTHON at PYTHON_DIGEST, must have Python 3.11 or newer, and pip. Packages are installed by their hashes
# into /opt/headroom, with the metadata that scanners read, and Headroom itself too. Both images run as user 65532 and
# work with a read-only file system.
#
# Of the base image they contain only Python and what it loads (release/minimal_root.py): no shell, no package manager.
ARG PYTHON=python:3.12-slim
ARG PYTHON_DIGEST

# Headroom's wheels: each has the packages that one image runs (docs/design/adr/0112).
FROM ${PYTHON}@${PYTHON_DIGEST} AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
RUN python3 -m venv --without-pip /opt/build
COPY requirements/build.txt requirements/build.txt
RUN pip --python /opt/build/bin/python install --require-hashes -r requirements/build.txt
COPY pyproject.toml README.md LICENSE ./

FROM build AS extender-wheel
COPY headroom/ headroom/
COPY extender/ extender/
RUN pip --python /opt/build/bin/python wheel --no-index --no-deps --no-build-isolation --wheel-dir /dist .

FROM build AS agent-wheel
COPY headroom/*.py headroom/
COPY headroom/client/ headroom/client/
COPY headroom/contract/ headroom/contract/
COPY headroom/system/ headroom/system/
COPY agent/ agent/
RUN pip --python /opt/build/bin/python wheel --no-index --no-deps --no-build-isolation --wheel-dir /dist .

# The packages of each image, with compiled bytecode: a read-only container could not save it.
FROM ${PYTHON}@${PYTHON_DIGEST} AS extender-packages
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
RUN python3 -m venv --without-pip /opt/headroom
COPY requirements/extender.txt requirements/extender.txt
RUN pip --python /opt/headroom/bin/python install --require-hashes -r requirements/extender.txt
COPY --from=extender-wheel /dist/ /dist/
RUN pip --python /opt/headroom/bin/python install --no-index --no-deps /dist/*.whl

FROM ${PYTHON}@${PYTHON_DIGEST} AS agent-packages
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
RUN python3 -m venv --without-pip /opt/headroom
COPY requirements/agent.txt requirements/agent.txt
RUN pip --python /opt/headroom/bin/python install --require-hashes -r requirements/agent.txt
COPY --from=agent-wheel /dist/ /dist/
RUN pip --python /opt/headroom/bin/python install --no-index --no-deps /dist/*.whl

FROM extender-packages AS extender-root
COPY release/minimal_root.py /
RUN python3 /minimal_root.py /minimal /opt/headroom

FROM agent-packages AS agent-root
COPY release/minimal_root.py /
RUN python3 /minimal_root.py /minimal /opt/headroom

FROM scratch AS extender
ENV PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 LANG=C.UTF-8 PATH=/opt/headroom/bin
COPY --from=extender-root /minimal/ /
COPY --from=extender-packages /opt/headroom/ /opt/headroom/
USER 65532:65532
# Extender: 8888 for kube-scheduler; 8889 for health, metrics and the journal. Console: 8889. Webhook: 9443.
EXPOSE 8888 8889 9443
ENTRYPOINT ["headroom"]
# The manifests pass extender, console, webhook or certs.
CMD ["--help"]
# deploy/images.sh adds version, commit and base image.
LABEL org.opencontainers.image.title=headroom-extender org.opencontainers.image.licenses=Apache-2.0

FROM scratch AS agent
ENV PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 LANG=C.UTF-8 PATH=/opt/headroom/bin
COPY --from=agent-root /minimal/ /
COPY --from=agent-packages /opt/headroom/ /opt/headroom/
USER 65532:65532
# Metrics and the gate. Health and the report are on 9411 of the loopback address.
EXPOSE 9410 9412
ENTRYPOINT ["headroom", "agent"]
# deploy/images.sh adds version, commit and base image.
LABEL org.opencontainers.image.title=headroom-agent org.opencontainers.image.licenses=Apache-2.0
