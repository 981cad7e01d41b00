# The commands of the Makefile in a container.
#
#   docker build -t megatron-moe .                       CPU
#   docker build -t megatron-moe --build-arg TORCH=torch==2.13.0 .     CUDA build of torch; run with --gpus all
#   docker run --rm megatron-moe                         make quickstart
#   docker run --rm megatron-moe make test
ARG PYTHON_VERSION=3.12
FROM python:${PYTHON_VERSION}-slim

ARG TORCH="torch==2.13.0+cpu --extra-index-url https://download.pytorch.org/whl/cpu"

# g++ builds the index helper; the tree works without it.
RUN apt-get update \
 && apt-get install -y --no-install-recommends g++ git make \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --create-home trainer
USER trainer
WORKDIR /home/trainer/megatron-moe

COPY --chown=trainer . .
RUN make install-test PYTHON=python3 TORCH="${TORCH}"

CMD ["make", "quickstart"]
