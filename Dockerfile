# weft on the CPU:  docker build -t weft .  &&  docker run --rm -v "$PWD:/work" -u "$(id -u)" weft train digits --out runs/first
FROM python:3.11-slim AS build
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
COPY . /src
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels /src

FROM python:3.11-slim
RUN apt-get update && apt-get install --yes --no-install-recommends libgomp1 && rm -rf /var/lib/apt/lists/*
COPY constraints.txt /tmp/
# The CPU build of PyTorch is much smaller than the one with CUDA, which pip would choose.
RUN pip install --no-cache-dir --constraint /tmp/constraints.txt --index-url https://download.pytorch.org/whl/cpu torch
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    pip install --no-cache-dir --constraint /tmp/constraints.txt /wheels/*.whl && rm /tmp/constraints.txt
# Any user may write there, so that --user can be the owner of a mounted folder.
RUN useradd weft && install --directory --mode 1777 /work /home/weft
USER weft
ENV HOME=/home/weft USER=weft
WORKDIR /work
HEALTHCHECK --interval=5m --timeout=1m --start-period=1m CMD ["weft", "doctor"]
ENTRYPOINT ["weft"]
CMD ["--help"]
