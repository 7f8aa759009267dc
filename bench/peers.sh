#!/bin/sh
# Make a virtual environment with what the benchmarks compare TensorHub with: bench/peers.sh FOLDER
# then: make bench ARGS="--peers-venv FOLDER"
#
# torch comes first and at an exact version, so that nothing else brings gigabytes of CUDA libraries; torchstore and
# checkpoint-engine come without their dependencies for the same reason. Mooncake needs libibverbs even for TCP: where
# apt has it, it is unpacked beside the packages, and nothing of the system changes.
set -eu
folder=${1:?"usage: bench/peers.sh FOLDER"}
"${PYTHON:-python3}" -m venv "$folder"
pip() { "$folder/bin/python" -m pip install -q --disable-pip-version-check "$@" || echo "peers: could not install $*" >&2; }
pip 'torch==2.13.0'
pip numpy ray
pip --no-deps 'mooncake-transfer-engine-non-cuda==0.3.13.post1'
pip msgpack aiohttp requests
pip --no-deps 'nixl-cu12==1.5.1'
pip --no-deps 'checkpoint-engine==0.4.2'
pip fastapi pydantic safetensors pyzmq uvicorn loguru httpx
pip --no-deps 'torchstore==0.1.2' 'torchmonarch==0.1.2' pygtrie
pip cloudpickle pyre-extensions tabulate opentelemetry-api
if command -v apt-get >/dev/null; then
    mkdir -p "$folder/native/packages"
    (
        cd "$folder/native/packages"
        apt-get download libibverbs1 librdmacm1 libnl-3-200 libnl-route-3-200 libnuma1 >/dev/null || true
        for package in *.deb; do [ -e "$package" ] && dpkg -x "$package" ..; done
    ) || echo "peers: could not unpack libibverbs; Mooncake will say that it is missing" >&2
fi
echo "peers: ready in $folder"
