# SPDX-License-Identifier: Apache-2.0
# lockstep_simt_kernels(NAME SOURCES...): the library NAME out of kernel files (kernels and their
# launchers), each compiled twice for the CPU.
#   simt_fast      plain
#   simt_checked   every load and store calls the executor (cuda_backend/simt/executor/tsan_hooks.cpp); the
#                  sanitizer's own runtime is not linked
# Sources may end in .cu: a wrapper gives them to the C++ compiler, so that the same file can be a CUDA
# source of another target.
function(lockstep_simt_kernels name)
  set(sources)
  foreach(source ${ARGN})
    get_filename_component(path ${source} ABSOLUTE)
    if(path MATCHES "\\.(cu|cuh)$")
      get_filename_component(stem ${path} NAME)
      set(wrapper ${CMAKE_CURRENT_BINARY_DIR}/${name}/${stem}.cpp)
      file(CONFIGURE OUTPUT ${wrapper} CONTENT "#include \"${path}\"\n" @ONLY)
      set(path ${wrapper})
    endif()
    list(APPEND sources ${path})
  endforeach()

  foreach(variant fast checked)
    add_library(${name}_${variant} OBJECT ${sources})
    target_link_libraries(${name}_${variant} PUBLIC lockstep_simt)
    target_compile_definitions(${name}_${variant} PRIVATE SIMT_VARIANT=simt_${variant})
    # Kernels view memory as 16-byte vectors of what it is not declared as.
    target_compile_options(${name}_${variant} PRIVATE -fno-strict-aliasing)
  endforeach()
  # -O3 takes twice as long to compile them as -O2, and replays are no faster.
  target_compile_options(${name}_fast PRIVATE $<$<CONFIG:Release>:-O2>)
  # -O2 in every build type: an unoptimised function would call a hook for each local variable. Other
  # sanitizers instrument the same accesses and are left to the fast variant, but for the alignment of
  # structs, which are stored member by member. Calls of memcpy stay calls.
  target_compile_definitions(${name}_checked PRIVATE SIMT_CHECKED)
  set(hooks thread,alignment)
  if(CMAKE_CXX_FLAGS MATCHES "-fsanitize=thread")  # preset threads: the hooks belong to TSan itself
    set(hooks alignment)
  endif()
  target_compile_options(${name}_checked PRIVATE -O2 -g1 -fno-sanitize=all
    -fsanitize=${hooks} -fsanitize-recover=alignment -Wno-tsan
    -fno-builtin-memcpy -fno-builtin-memmove -fno-builtin-memset
    $<$<CXX_COMPILER_ID:GNU>:--param=tsan-instrument-func-entry-exit=0>
    $<$<CXX_COMPILER_ID:Clang>:SHELL:-mllvm -tsan-instrument-func-entry-exit=0>
    $<$<CXX_COMPILER_ID:Clang>:SHELL:-mllvm -tsan-instrument-read-before-write>)

  add_library(${name} STATIC $<TARGET_OBJECTS:${name}_fast> $<TARGET_OBJECTS:${name}_checked>)
  set_target_properties(${name} PROPERTIES LINKER_LANGUAGE CXX)
  target_link_libraries(${name} PUBLIC lockstep_simt)
  if(hooks STREQUAL alignment)
    return()
  endif()
  add_custom_command(TARGET ${name} POST_BUILD VERBATIM COMMAND ${CMAKE_COMMAND} -D NM=${CMAKE_NM}
    -D "FAST=$<JOIN:$<TARGET_OBJECTS:${name}_fast>,|>"
    -D EXECUTOR=$<TARGET_FILE:lockstep_simt>
    -D "CHECKED=$<JOIN:$<TARGET_OBJECTS:${name}_checked>,|>"
    -P ${CMAKE_CURRENT_FUNCTION_LIST_DIR}/lockstep_simt_objects.cmake)
endfunction()
