# SPDX-License-Identifier: Apache-2.0
# Kernels that somebody else publishes, as headers of a Python package: LOCKSTEP_FLASHINFER_MISSING says what
# is not there, in the words of whoever does without it; empty: LOCKSTEP_FLASHINFER_HEADERS are theirs and
# those of the CCCL that comes with them.
set(LOCKSTEP_FLASHINFER "" CACHE PATH "FlashInfer's package (the folder flashinfer); empty: ask python3")
if(NOT LOCKSTEP_FLASHINFER)
  execute_process(OUTPUT_VARIABLE found_flashinfer ERROR_QUIET OUTPUT_STRIP_TRAILING_WHITESPACE
    COMMAND python3 -c "import importlib.util as u; print(u.find_spec('flashinfer').submodule_search_locations[0])")
else()
  set(found_flashinfer ${LOCKSTEP_FLASHINFER})
endif()
set(LOCKSTEP_FLASHINFER_HEADERS ${found_flashinfer}/data/include
  ${found_flashinfer}/data/cccl/libcudacxx/include)
set(LOCKSTEP_FLASHINFER_MISSING "")
if(NOT EXISTS ${found_flashinfer}/data/include/flashinfer/page.cuh)
  set(LOCKSTEP_FLASHINFER_MISSING "FlashInfer is not installed (python3 -m pip install flashinfer-python, or -DLOCKSTEP_FLASHINFER=DIR)")
endif()
