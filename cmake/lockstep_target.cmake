# SPDX-License-Identifier: Apache-2.0
# Flags that every target shares, and the ways to declare one.
set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
set(CMAKE_RUNTIME_OUTPUT_DIRECTORY ${lockstep_BINARY_DIR})

find_program(LOCKSTEP_CCACHE ccache)
if(LOCKSTEP_CCACHE)
  set(CMAKE_CXX_COMPILER_LAUNCHER ${LOCKSTEP_CCACHE})
endif()

# Sources of a target are compiled in batches: headers are read, and templates optimised, once a
# batch. Anonymous namespaces of one target share their names. Off: one by one.
option(LOCKSTEP_UNITY "Compile the sources of a target in batches" ON)
set(CMAKE_UNITY_BUILD ${LOCKSTEP_UNITY})
set(CMAKE_UNITY_BUILD_BATCH_SIZE 20)

find_package(fmt REQUIRED)
find_package(Threads REQUIRED)

set(default_march "")
if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  set(default_march x86-64-v3)  # AVX2: every server since 2013
endif()
set(LOCKSTEP_MARCH "${default_march}" CACHE STRING "The oldest CPU to build for; empty: the compiler's")

add_library(lockstep_flags INTERFACE)
# -ffile-prefix-map: the binary names its sources from the root of the tree, wherever that is.
target_compile_options(lockstep_flags INTERFACE
  "$<$<COMPILE_LANGUAGE:CXX>:-ffile-prefix-map=${lockstep_SOURCE_DIR}/=>")
# -ffp-contract=off: a result must not depend on which products the compiler fuses.
target_compile_options(lockstep_flags INTERFACE
  "$<$<COMPILE_LANGUAGE:CXX>:-Wall;-Wextra;-Wshadow;-Wconversion;-Wno-sign-conversion;-ffp-contract=off>"
  "$<$<AND:$<COMPILE_LANGUAGE:CXX>,$<BOOL:${LOCKSTEP_MARCH}>>:-march=${LOCKSTEP_MARCH}>")
if(CMAKE_CXX_COMPILER_ID STREQUAL GNU AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
  # GCC bug 105651: std::string's operator+ is warned about wherever it is inlined.
  target_compile_options(lockstep_flags INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-Wno-restrict>)
endif()
if(CMAKE_CXX_COMPILER_ID STREQUAL GNU)
  # The compiler clears its heap first at 512 MB; before that it costs time and gives nothing.
  target_compile_options(lockstep_flags INTERFACE
    "$<$<COMPILE_LANGUAGE:CXX>:SHELL:--param ggc-min-heapsize=524288>")
endif()
target_include_directories(lockstep_flags INTERFACE ${lockstep_SOURCE_DIR})

# For code whose own time is nothing beside what it calls, and which is long to compile: optimised
# no further than -Og in a release.
add_library(lockstep_compiled_quickly INTERFACE)
target_compile_options(lockstep_compiled_quickly INTERFACE
  $<$<AND:$<COMPILE_LANGUAGE:CXX>,$<CONFIG:Release>>:-Og>)

# lockstep_library(NAME FOLDER DEPENDENCIES...): the sources of a folder as one static library.
function(lockstep_library name folder)
  file(GLOB sources CONFIGURE_DEPENDS ${folder}/*.cpp ${folder}/*.h)
  add_library(${name} STATIC ${sources})
  set_target_properties(${name} PROPERTIES LINKER_LANGUAGE CXX)
  target_link_libraries(${name} PUBLIC lockstep_flags fmt::fmt ${ARGN})
endfunction()

# lockstep_arrows(PATH ROOMS...): the folder PATH, from the root, may include the folders ROOMS and no
# others (tests/tidy; docs/architecture.md has the picture).
function(lockstep_arrows path)
  list(JOIN ARGN " " arrows)
  set_property(GLOBAL APPEND PROPERTY LOCKSTEP_ROOMS "${path}: ${arrows}")
endfunction()

# The libraries of rooms: lockstep_PATH, where slashes have become underscores.
function(lockstep_libraries out)
  list(TRANSFORM ARGN REPLACE "/" "_" OUTPUT_VARIABLE libraries)
  list(TRANSFORM libraries PREPEND lockstep_)
  set(${out} ${libraries} PARENT_SCOPE)
endfunction()

# lockstep_room(PATH ROOMS...): the folder PATH as a library, with these arrows.
function(lockstep_room path)
  lockstep_libraries(libraries ${ARGN})
  lockstep_libraries(name ${path})
  lockstep_library(${name} ${lockstep_SOURCE_DIR}/${path} ${libraries})
  lockstep_arrows(${path} ${ARGN})
endfunction()

# All rooms and their arrows, one line each, into a file. A folder that is compiled into another
# room's library has no arrows of its own: "FOLDER = ROOM".
function(lockstep_write_rooms file)
  get_property(rooms GLOBAL PROPERTY LOCKSTEP_ROOMS)
  set(shared)
  foreach(line ${rooms})
    string(REGEX REPLACE ":.*" "" room "${line}")
    lockstep_libraries(library ${room})
    if(NOT TARGET ${library})
      continue()
    endif()
    get_target_property(sources ${library} SOURCES)
    foreach(source ${sources})
      get_filename_component(folder ${source} DIRECTORY)
      file(RELATIVE_PATH folder ${lockstep_SOURCE_DIR} ${folder})
      if(NOT folder STREQUAL room AND NOT folder MATCHES "^(\\.\\.|${room}|build)/")
        list(APPEND shared "${folder} = ${room}")
      endif()
    endforeach()
  endforeach()
  list(REMOVE_DUPLICATES shared)
  list(JOIN rooms "\n" rooms)
  list(JOIN shared "\n" shared)
  file(CONFIGURE OUTPUT ${file} CONTENT "@rooms@\n@shared@\n" @ONLY)
endfunction()
