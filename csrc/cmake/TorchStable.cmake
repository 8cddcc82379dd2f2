# Asks the build's Python for torch's headers and libraries: sets TORCH_STABLE_INCLUDE_DIRS, TORCH_STABLE_LIBRARY,
# TORCH_STABLE_VERSION and TORCH_STABLE_CUDA (CUDA version of torch, "None" for a CPU-only torch).
find_package(Python REQUIRED COMPONENTS Interpreter)
set(_query [[
import os, torch
from torch.utils import cpp_extension
print(";".join(cpp_extension.include_paths()))
print(os.path.join(os.path.dirname(torch.__file__), "lib", "libtorch.so"))
print(torch.__version__)
print(torch.version.cuda)
]])
execute_process(COMMAND "${Python_EXECUTABLE}" -c "${_query}"
    OUTPUT_VARIABLE _answer ERROR_VARIABLE _error RESULT_VARIABLE _status OUTPUT_STRIP_TRAILING_WHITESPACE)
if(NOT _status EQUAL 0)
    message(FATAL_ERROR "torch cannot be imported by ${Python_EXECUTABLE}, which builds the CUDA kernels: install torch >= 2.11 there (with pip: --no-build-isolation), or build without them: -DMTRAINING_CUDA=OFF")
endif()
string(REPLACE ";" "\\;" _answer "${_answer}")
string(REPLACE "\n" ";" _answer "${_answer}")
list(GET _answer 0 TORCH_STABLE_INCLUDE_DIRS)
list(GET _answer 1 TORCH_STABLE_LIBRARY)
list(GET _answer 2 TORCH_STABLE_VERSION)
list(GET _answer 3 TORCH_STABLE_CUDA)
if(TORCH_STABLE_VERSION VERSION_LESS 2.11)
    message(FATAL_ERROR "torch ${TORCH_STABLE_VERSION} is too old for the CUDA kernels: torch >= 2.11 is needed")
endif()
