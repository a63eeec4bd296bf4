# Two images from one file:
#   docker build --target extender -t headroom-extender .
#   docker build --target agent    -t headroom-agent .
# Both run as a user without a name, from a file system that may be read-only.

FROM python:3.12-slim AS base
ENV PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
WORKDIR /app
COPY contract/ contract/

FROM base AS extender
COPY requirements/extender.txt requirements/extender.txt
RUN pip install --no-cache-dir --disable-pip-version-check --require-hashes -r requirements/extender.txt
COPY extender/ extender/
USER 65532:65532
# 8888: kube-scheduler's verbs. 8889: debug API.
EXPOSE 8888 8889
ENTRYPOINT ["python", "-m", "extender"]
CMD ["serve", "--debug-host", "0.0.0.0"]

FROM base AS agent
COPY requirements/agent.txt requirements/agent.txt
RUN pip install --no-cache-dir --disable-pip-version-check --require-hashes -r requirements/agent.txt
COPY agent/ agent/
USER 65532:65532
# 9410: metrics, the report, health.
EXPOSE 9410
ENTRYPOINT ["python", "-m", "agent"]
