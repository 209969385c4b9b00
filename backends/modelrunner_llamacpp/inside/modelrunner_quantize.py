"""Quantizes a model inside a Python that has llama-cpp-python, by llama.cpp's own function (`llama_model_quantize` of
llama.h). It is the child process of a quantization.

It is started by path (`python -I modelrunner_quantize.py MODEL TARGET TYPE THREADS`) with the engine's own interpreter,
as modelrunner_serve.py is. With 0 threads it uses all processors.
"""

import ctypes
import sys


def main() -> None:
    import llama_cpp

    model, target, kind, threads = sys.argv[1:]
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_{'ALL' if kind == 'F32' else 'MOSTLY'}_{kind}")
    params.nthread = int(threads)
    params.allow_requantize = True
    llama_cpp.llama_backend_init()
    if llama_cpp.llama_model_quantize(model.encode(), target.encode(), ctypes.byref(params)) != 0:
        sys.exit(f"error: {model} could not be quantized")


if __name__ == "__main__":
    main()
