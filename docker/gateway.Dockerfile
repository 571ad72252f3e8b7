# SGLang's model gateway (smg), which spreads requests over servers; docs/cluster.md says how.
#   docker build -f docker/gateway.Dockerfile -t mamba-eagle-gateway docker
# It asks for the servers' key, if MAMBA_EAGLE_API_KEY has it, and sends it to them.
FROM python:3.11-slim

RUN useradd --create-home --uid 1000 serve \
    && pip install --no-cache-dir smg==1.13.0

USER 1000
WORKDIR /home/serve
EXPOSE 30000 29000
HEALTHCHECK --interval=10s --timeout=3s --start-period=30s CMD ["python", "-c", \
    "import urllib.request as r; r.urlopen('http://127.0.0.1:30000/readiness', timeout=2)"]
ENTRYPOINT ["sh", "-c", "exec python -m smg launch --host 0.0.0.0 \
    ${MAMBA_EAGLE_API_KEY:+--api-key \"$MAMBA_EAGLE_API_KEY\"} \"$@\"", "gateway"]
