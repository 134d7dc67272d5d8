# SPDX-License-Identifier: Apache-2.0
# What other projects use of this one: lockstep::plugin, lockstep::recorder, lockstep::lockstep and the
# functions of lockstepTesting.cmake. One layout of headers, <lockstep/NAME.h>, in the build folder as
# in an installation.
set(headers ${lockstep_BINARY_DIR}/include/lockstep)
configure_file(${lockstep_SOURCE_DIR}/cuda_backend/plugin/plugin.h ${headers}/plugin.h COPYONLY)
configure_file(${lockstep_SOURCE_DIR}/traces/recorder/recorder.h ${headers}/recorder.h COPYONLY)
# The example of plain loops, for a kernel of yours to take the place of one of them.
set(plain ${lockstep_SOURCE_DIR}/docs/examples/plain_plugin.cpp)
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${plain})
file(READ ${plain} text)
string(REPLACE "\"cuda_backend/plugin/plugin.h\"" "<lockstep/plugin.h>" text "${text}")
file(CONFIGURE OUTPUT ${headers}/plain_plugin.h CONTENT "${text}" @ONLY)

add_library(lockstep_plugin INTERFACE)
target_compile_features(lockstep_plugin INTERFACE cxx_std_20)
set_target_properties(lockstep_plugin PROPERTIES EXPORT_NAME plugin)
foreach(target lockstep_plugin lockstep_recorder)
  target_include_directories(${target} INTERFACE
    $<BUILD_INTERFACE:${lockstep_BINARY_DIR}/include> $<INSTALL_INTERFACE:include>)
endforeach()
add_library(lockstep::plugin ALIAS lockstep_plugin)
add_library(lockstep::recorder ALIAS lockstep_recorder)
add_executable(lockstep::lockstep ALIAS lockstep)
