# SPDX-License-Identifier: Apache-2.0
# Run by lockstep_simt_kernels() on every build: are the two compilations of kernel files what they
# claim to be, and kept apart? Arguments: NM, FAST and CHECKED (objects, separated by |), EXECUTOR (its
# library).
#  1. The checked objects call the hooks, the fast ones do not.
#  2. No function of ours is emitted as a weak symbol by both: the linker would keep one of the two for
#     both variants. (Of std and fmt, only host code of launchers is large enough to be emitted.)
#  3. Nor is any by a checked object and the executor, whose own code must not call hooks.
#  4. No checked object calls memcpy, memmove or memset past the checker.
cmake_policy(SET CMP0057 NEW)

# Symbols of all objects whose nm line matches the type pattern.
function(symbols_of out objects types)
  string(REPLACE "|" ";" objects "${objects}")
  execute_process(COMMAND ${NM} -C ${objects} OUTPUT_VARIABLE text RESULT_VARIABLE status)
  if(NOT status EQUAL 0)
    message(FATAL_ERROR "${NM} failed on ${objects}")
  endif()
  string(REPLACE ";" "," text "${text}")
  string(REGEX MATCHALL "[^\n]+" lines "${text}")
  set(found)
  foreach(line ${lines})
    if(line MATCHES "^[0-9a-f ]+ (${types}) (.*)$")
      list(APPEND found "${CMAKE_MATCH_2}")
    endif()
  endforeach()
  list(REMOVE_DUPLICATES found)
  set(${out} "${found}" PARENT_SCOPE)
endfunction()

symbols_of(fast_needs "${FAST}" "U")
symbols_of(checked_needs "${CHECKED}" "U")
if(NOT "${checked_needs}" MATCHES "__tsan_(read|write)")
  message(FATAL_ERROR "simt: no checked kernel object calls a hook: was -fsanitize=thread dropped?")
endif()
if("${fast_needs}" MATCHES "__tsan_")
  message(FATAL_ERROR "simt: a fast kernel object calls hooks")
endif()
foreach(function memcpy memmove memset)
  if(function IN_LIST checked_needs)
    message(FATAL_ERROR "simt: a checked kernel object calls ${function} unseen by the checker")
  endif()
endforeach()

symbols_of(fast_weak "${FAST}" "[WVu]")
symbols_of(checked_weak "${CHECKED}" "[WVu]")
foreach(symbol ${fast_weak})
  if(symbol IN_LIST checked_weak AND NOT symbol MATCHES "(^|[ <(&*])(std|fmt|__gnu_cxx)::")
    message(FATAL_ERROR "simt: both variants define ${symbol}; move it into namespace SIMT_VARIANT")
  endif()
endforeach()

symbols_of(executor_weak "${EXECUTOR}" "[WVu]")
foreach(symbol ${executor_weak})
  if(symbol IN_LIST checked_weak)
    message(FATAL_ERROR "simt: the executor and a checked kernel object both define ${symbol}; keep "
      "host code that needs it out of kernel files")
  endif()
endforeach()
