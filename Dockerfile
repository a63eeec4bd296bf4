# Two images from one file:
#   docker build --target extender --build-arg PYTHON_DIGEST=sha256:... -t REGISTRY/headroom-extender:0.1.0 .
#   docker build --target agent    --build-arg PYTHON_DIGEST=sha256:... -t REGISTRY/headroom-agent:0.1.0 .
#
# You choose the base image by its digest; docs/install.md shows how to find it. Packages are pinned by their hashes. Both
# images run as user id 65532, which has no name in /etc/passwd, and need no writable file system. All packages, including
# Headroom's, are in /opt/headroom with their metadata, so that scanners find them.
ARG PYTHON=python:3.12-slim
ARG PYTHON_DIGEST

# Builds Headroom as one wheel.
FROM ${PYTHON}@${PYTHON_DIGEST} AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
COPY requirements/build.txt requirements/build.txt
RUN pip install --require-hashes -r requirements/build.txt
COPY pyproject.toml README.md LICENSE ./
COPY contract/ contract/
COPY extender/ extender/
COPY agent/ agent/
COPY headroom/ headroom/
RUN pip wheel --no-index --no-deps --no-build-isolation --wheel-dir /dist .

# Installs the packages of each image, byte-compiled: a read-only container could not store compiled files.
FROM ${PYTHON}@${PYTHON_DIGEST} AS extender-packages
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
RUN python -m venv --without-pip /opt/headroom
COPY requirements/extender.txt requirements/extender.txt
RUN pip --python /opt/headroom/bin/python install --require-hashes -r requirements/extender.txt
COPY --from=build /dist/ /dist/
RUN pip --python /opt/headroom/bin/python install --no-index --no-deps /dist/*.whl

FROM ${PYTHON}@${PYTHON_DIGEST} AS agent-packages
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
RUN python -m venv --without-pip /opt/headroom
COPY requirements/agent.txt requirements/agent.txt
RUN pip --python /opt/headroom/bin/python install --require-hashes -r requirements/agent.txt
COPY --from=build /dist/ /dist/
RUN pip --python /opt/headroom/bin/python install --no-index --no-deps /dist/*.whl

FROM ${PYTHON}@${PYTHON_DIGEST} AS extender
LABEL org.opencontainers.image.title=headroom-extender org.opencontainers.image.licenses=Apache-2.0
ENV PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 PATH=/opt/headroom/bin:$PATH
COPY --from=extender-packages /opt/headroom/ /opt/headroom/
USER 65532:65532
# 8888: kube-scheduler's verbs. 8889: debug API. 9443: admission webhook.
EXPOSE 8888 8889 9443
ENTRYPOINT ["headroom"]
CMD ["serve", "--debug-host", "0.0.0.0"]

FROM ${PYTHON}@${PYTHON_DIGEST} AS agent
LABEL org.opencontainers.image.title=headroom-agent org.opencontainers.image.licenses=Apache-2.0
ENV PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 PATH=/opt/headroom/bin:$PATH
COPY --from=agent-packages /opt/headroom/ /opt/headroom/
USER 65532:65532
# 9410: metrics and the gate. 9411 on the loopback: health and the report.
EXPOSE 9410
ENTRYPOINT ["headroom", "agent"]
