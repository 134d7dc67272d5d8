# SPDX-License-Identifier: Apache-2.0
# Tests of your project by `lockstep`, for CTest. Included by find_package(lockstep), and where this
# project is part of yours (FetchContent, add_subdirectory).
#
#   lockstep_add_replay_test(NAME TRACE [BACKEND backend] [ARGS option...])
#       TRACE, through the model and a backend, every step compared: a trace, a recording, a saved
#       case, or the name of a bundled sample (shared_prefixes.jsonl)
#   lockstep_add_fuzz_test(NAME [SEEDS first:last] [BACKEND backend] [DECISIONS command]
#                          [KNOWN file] [ARGS option...])
#       generated cases of the seeds first to last - 1 (0:100); DECISIONS: an engine that speaks
#       docs/protocols.md, in place of the model
#   lockstep_add_audit_test(NAME RECORDING... [AFTER test] [ARGS option...])
#       recorded decisions; AFTER: the test that writes the recordings
#
# backend: a target (a MODULE library that includes <lockstep/plugin.h>), a file of one, or simt,
# cuda, none. Relative paths begin in the current source folder where a file is there, else in the
# current build folder, in which tests run; RECORDINGs that a test writes always in the latter.
# LOCKSTEP_COMMAND names another lockstep, that of a wheel for one. A failure's smallest case
# lies in lockstep_cases/NAME of the build folder; JUnit's XML beside it, NAME.xml.

# A relative path begins where cmake is started; a name without a slash is found through PATH.
if(NOT LOCKSTEP_COMMAND OR LOCKSTEP_COMMAND MATCHES "/")
  set(LOCKSTEP_COMMAND "" CACHE FILEPATH
    "The lockstep that tests run; empty: the one of this package")
endif()

function(_lockstep_command out)
  if(LOCKSTEP_COMMAND)
    set(${out} ${LOCKSTEP_COMMAND} PARENT_SCOPE)
  elseif(TARGET lockstep::lockstep)
    set(${out} $<TARGET_FILE:lockstep::lockstep> PARENT_SCOPE)
  else()
    message(FATAL_ERROR "this package of lockstep has no command; set LOCKSTEP_COMMAND to one")
  endif()
endfunction()

# Sets `out` to the file of the source folder if there is one, else to `name`: an element of a list,
# with its semicolons escaped.
function(_lockstep_file out name)
  get_filename_component(path "${name}" ABSOLUTE)
  if(NOT EXISTS "${path}")
    set(path "${name}")
  endif()
  string(REPLACE ";" "\\;" path "${path}")
  set(${out} "${path}" PARENT_SCOPE)
endfunction()

# Options in `out` for a backend of any kind.
function(_lockstep_backend out backend)
  if(NOT backend)
    set(${out} PARENT_SCOPE)
  elseif(TARGET "${backend}")
    set(${out} --backend $<TARGET_FILE:${backend}> PARENT_SCOPE)
  else()
    if(backend MATCHES "\\.so$")  # a folder may be named vllm
      _lockstep_file(backend "${backend}")
    endif()
    set(${out} --backend "${backend}" PARENT_SCOPE)
  endif()
endfunction()

# REQUIRES: cmake_parse_arguments() of `of` has run. Refuses keywords without a value and `unknown`
# words, as a misspelt keyword is. A project's list of ARGS may be empty.
macro(_lockstep_refuse of unknown)
  list(REMOVE_ITEM arg_KEYWORDS_MISSING_VALUES ARGS)
  if(arg_KEYWORDS_MISSING_VALUES)
    message(FATAL_ERROR "${of}: no value for ${arg_KEYWORDS_MISSING_VALUES}")
  endif()
  if(NOT "${unknown}" STREQUAL "")
    message(FATAL_ERROR "${of}: unknown argument ${unknown}")
  endif()
endmacro()

# Parsed because ARGN would split arguments with semicolons.
function(_lockstep_add_test name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "" "")
  _lockstep_command(command)
  set(folder ${CMAKE_CURRENT_BINARY_DIR}/lockstep_cases)
  get_filename_component(parent ${folder}/${name} DIRECTORY)  # a name may have slashes
  file(MAKE_DIRECTORY ${parent})
  add_test(NAME ${name} COMMAND ${command} ${arg_UNPARSED_ARGUMENTS}
    --junit ${folder}/${name}.xml)
  set_property(TEST ${name} APPEND PROPERTY LABELS lockstep)
endfunction()

function(lockstep_add_replay_test name trace)
  cmake_parse_arguments(PARSE_ARGV 2 arg "" "BACKEND" "ARGS")
  _lockstep_refuse(lockstep_add_replay_test "${arg_UNPARSED_ARGUMENTS}")
  _lockstep_backend(backend "${arg_BACKEND}")
  _lockstep_file(trace "${trace}")
  _lockstep_add_test(${name} replay ${trace} ${backend} ${arg_ARGS}
    --save ${CMAKE_CURRENT_BINARY_DIR}/lockstep_cases/${name} --shrink --shrink-seconds 20)
endfunction()

function(lockstep_add_fuzz_test name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "SEEDS;BACKEND;DECISIONS;KNOWN" "ARGS")
  _lockstep_refuse(lockstep_add_fuzz_test "${arg_UNPARSED_ARGUMENTS}")
  if(NOT arg_SEEDS)
    set(arg_SEEDS 0:100)
  endif()
  if(NOT arg_SEEDS MATCHES "^([0-9]+):([0-9]+)$")
    message(FATAL_ERROR "lockstep_add_fuzz_test: SEEDS ${arg_SEEDS}; expected first:last")
  endif()
  set(first ${CMAKE_MATCH_1})
  math(EXPR runs "${CMAKE_MATCH_2} - ${first}")
  if(runs LESS 1)
    message(FATAL_ERROR "lockstep_add_fuzz_test: SEEDS ${arg_SEEDS} has no seed")
  endif()
  _lockstep_backend(words "${arg_BACKEND}")
  if(arg_DECISIONS)
    string(REPLACE ";" "\\;" decisions "${arg_DECISIONS}")
    list(APPEND words --decisions "${decisions}")
  endif()
  if(arg_KNOWN)
    _lockstep_file(known "${arg_KNOWN}")
    list(APPEND words --known "${known}")
  endif()
  _lockstep_add_test(${name} fuzz --seed ${first} --runs ${runs} ${words} ${arg_ARGS}
    --save ${CMAKE_CURRENT_BINARY_DIR}/lockstep_cases/${name} --shrink-seconds 20)
endfunction()

function(lockstep_add_audit_test name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "AFTER" "ARGS")
  # A word in capitals is a misspelt keyword, not a recording.
  set(unknown ${arg_UNPARSED_ARGUMENTS})
  list(FILTER unknown INCLUDE REGEX "^[A-Z_]+$")
  _lockstep_refuse(lockstep_add_audit_test "${unknown}")
  if("${arg_UNPARSED_ARGUMENTS}" STREQUAL "")
    message(FATAL_ERROR "lockstep_add_audit_test: ${name} has no recording")
  endif()
  set(recordings "${arg_UNPARSED_ARGUMENTS}")
  if(NOT arg_AFTER)
    set(recordings)
    foreach(recording ${arg_UNPARSED_ARGUMENTS})
      _lockstep_file(recording "${recording}")
      list(APPEND recordings "${recording}")
    endforeach()
  endif()
  _lockstep_add_test(${name} audit ${recordings} ${arg_ARGS})
  if(arg_AFTER)
    set_property(TEST ${arg_AFTER} APPEND PROPERTY FIXTURES_SETUP lockstep_${arg_AFTER})
    set_property(TEST ${name} APPEND PROPERTY FIXTURES_REQUIRED lockstep_${arg_AFTER})
  endif()
endfunction()
