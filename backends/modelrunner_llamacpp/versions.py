"""The engines that this release installs: exact versions and digests, here and nowhere else."""

# The prebuilt wheel: llama.cpp's server as a Python extension. The files of one version, one for each platform.
WHEEL = "xllamacpp"
WHEEL_VERSION = "2026.10.11549"
WHEEL_SHA256 = (
    "c54e7d13520ecc989c63dc99d55de3065e2f343a91f43f053d16b5e62077c261",  # manylinux2014 x86_64
    "e2a3e79e775515de4ad197e667f874070446ef9ac9cf2044bc9866bc4c72289e",  # manylinux2014 aarch64
    "4ecda27a308b2403aa13c9d04b270befab95edc556c24ed00b2f8a98bd7f6781",  # macOS 13 arm64
    "1f2a08052bb653659bcf1bedbbaf86b97f41dd46aa2763d596d7f27c5d89a689",  # macOS 13 x86_64
)

# The source distribution that carries all of llama.cpp in vendor/llama.cpp.
SOURCE = "llama-cpp-python"
SOURCE_VERSION = "0.3.36"
SOURCE_SHA256 = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
SOURCE_TREE = f"llama_cpp_python-{SOURCE_VERSION}/vendor/llama.cpp"
