# The quickstart on CPUs, by a user without rights:
#
#     docker build --tag rolloutmq .
#     docker run --rm --init --shm-size=1g rolloutmq
FROM python:3.11-slim
RUN useradd --create-home rolloutmq
USER rolloutmq
WORKDIR /home/rolloutmq
RUN python -m venv venv
ENV PATH=/home/rolloutmq/venv/bin:$PATH

# First torch's build for CPUs; else pip takes that for GPUs, of several GB.
RUN pip install --no-cache-dir torch --index-url https://download.pytorch.org/whl/cpu
COPY --chown=rolloutmq . source
RUN pip install --no-cache-dir './source[trainer,report]' && mv source/examples examples && rm -r source
CMD ["rolloutmq", "up", "examples/quickstart.toml", "--plain"]
