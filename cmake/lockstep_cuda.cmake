# SPDX-License-Identifier: Apache-2.0
# A CUDA toolkit is used when there is one: LOCKSTEP_HAVE_CUDA says whether. Looked for in CUDACXX,
# the PATH, CUDA_PATH and /usr/local/cuda; -DCMAKE_CUDA_COMPILER=... names another.
#
# Kernels are compiled for one compute capability: that of the GPU in this machine, else the lowest
# that they are written for, from whose PTX a driver compiles for any newer GPU. `all`, as in the
# preset cuda, compiles for each of the known ones, which takes four times as long.
set(LOCKSTEP_HAVE_CUDA OFF)
set(LOCKSTEP_CUDA_ARCHITECTURES "" CACHE STRING
  "Compute capabilities (80;90), or all; empty: the one of this machine")

# The compute capabilities to compile for, by the rule above.
function(lockstep_cuda_architectures out)
  set(known 80 90)
  if(CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 12.8)
    list(APPEND known 100 120)  # an older toolkit knows no Blackwell
  endif()
  set(asked ${LOCKSTEP_CUDA_ARCHITECTURES})
  if(NOT asked)
    execute_process(COMMAND nvidia-smi --query-gpu=compute_cap --format=csv,noheader ERROR_QUIET
      OUTPUT_VARIABLE present RESULT_VARIABLE status)
    if(status STREQUAL "0" AND present MATCHES "^([0-9]+)\\.([0-9])")
      set(asked ${CMAKE_MATCH_1}${CMAKE_MATCH_2})
    endif()
    if(NOT asked IN_LIST known)  # what the toolkit may not know runs the PTX of the lowest
      list(GET known 0 asked)
    endif()
  elseif(asked STREQUAL "all")
    set(asked ${known})
  endif()
  set(${out} ${asked} PARENT_SCOPE)
endfunction()

if(LOCKSTEP_CUDA)
  if(NOT CMAKE_CUDA_COMPILER AND NOT DEFINED ENV{CUDACXX})
    find_program(LOCKSTEP_NVCC nvcc HINTS $ENV{CUDA_PATH}/bin /usr/local/cuda/bin)
    if(LOCKSTEP_NVCC)
      set(CMAKE_CUDA_COMPILER ${LOCKSTEP_NVCC})
    endif()
  endif()
  include(CheckLanguage)
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    enable_language(CUDA)
    set(LOCKSTEP_HAVE_CUDA ON)
    set(CMAKE_CUDA_STANDARD 20)
    set(CMAKE_CUDA_STANDARD_REQUIRED ON)
    set(CMAKE_CUDA_EXTENSIONS OFF)
    if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)  # CMake up to 3.25.1 does not know that nvcc 12 has it
      set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION -std=c++20)
      set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION -std=c++20)
    endif()
    if(LOCKSTEP_CCACHE)
      set(CMAKE_CUDA_COMPILER_LAUNCHER ${LOCKSTEP_CCACHE})
    endif()
    lockstep_cuda_architectures(CMAKE_CUDA_ARCHITECTURES)
    message(STATUS "CUDA ${CMAKE_CUDA_COMPILER_VERSION} for sm ${CMAKE_CUDA_ARCHITECTURES}")
  elseif(LOCKSTEP_CUDA_REQUIRED)
    message(FATAL_ERROR "LOCKSTEP_CUDA_REQUIRED is on and no CUDA compiler (nvcc) was found")
  else()
    message(STATUS "No CUDA toolkit: the kernels run on the CPU alone")
  endif()
endif()
set(LOCKSTEP_BUILT_WITH_CUDA ${LOCKSTEP_HAVE_CUDA} CACHE INTERNAL "Read by ./run test")
