# SPDX-License-Identifier: Apache-2.0
# What `cmake --install DIR` puts under a prefix, by component:
#   command      bin/lockstep, share/lockstep/traces/samples
#   python       share/lockstep/python: recorder, adapters, pytest plugin
#   development  the recorder's library, lib/cmake/lockstep (find_package(lockstep))
#   libraries    lib/lockstep: what the command links beyond the C and C++ runtimes; for a wheel,
#                and only when it is asked for
#   headers      include/lockstep
# A wheel has its own folders for the first and the last (scikit-build-core names them).
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

if(SKBUILD)
  set(bin_dir ${SKBUILD_SCRIPTS_DIR})
  set(share_dir ${SKBUILD_DATA_DIR}/share/lockstep)
  set(bundled_dir ${SKBUILD_DATA_DIR}/lib/lockstep)
  set(include_dir ${SKBUILD_DATA_DIR}/include/lockstep)
else()
  set(bin_dir ${CMAKE_INSTALL_BINDIR})
  set(share_dir share/lockstep)
  set(bundled_dir lib/lockstep)
  set(include_dir include/lockstep)
endif()

set_target_properties(lockstep PROPERTIES INSTALL_RPATH "$ORIGIN/../lib/lockstep")
install(TARGETS lockstep RUNTIME DESTINATION ${bin_dir} COMPONENT command)
install(DIRECTORY traces/samples DESTINATION ${share_dir}/traces COMPONENT command)
install(DIRECTORY tests/regressions DESTINATION ${share_dir}/tests COMPONENT command
  FILES_MATCHING PATTERN "*.jsonl")
file(STRINGS pyproject.toml packages REGEX "^ +\"python/")  # wheel.packages
string(REGEX MATCHALL "python/[a-z_]+" packages "${packages}")
install(DIRECTORY ${packages}
  DESTINATION ${share_dir}/python COMPONENT python PATTERN __pycache__ EXCLUDE)

# A link under a name of its own would become a copy in a wheel: each library comes once, by the name
# that the command asks for.
file(GENERATE OUTPUT ${CMAKE_CURRENT_BINARY_DIR}/install_libraries.cmake CONTENT "
file(GET_RUNTIME_DEPENDENCIES EXECUTABLES \"$<TARGET_FILE:lockstep>\" RESOLVED_DEPENDENCIES_VAR found
  PRE_EXCLUDE_REGEXES \"^ld-linux\" \"^lib(c|m|dl|rt|pthread|stdc\\\\+\\\\+|gcc_s)\\\\.so\")
set(folder \"${bundled_dir}\")
if(NOT IS_ABSOLUTE \"\${folder}\")
  set(folder \"\$ENV{DESTDIR}\${CMAKE_INSTALL_PREFIX}/\${folder}\")
endif()
foreach(library IN LISTS found)
  get_filename_component(name \"\${library}\" NAME)
  file(REAL_PATH \"\${library}\" library)
  file(MAKE_DIRECTORY \"\${folder}\")
  file(COPY_FILE \"\${library}\" \"\${folder}/\${name}\")
endforeach()
")
install(SCRIPT ${CMAKE_CURRENT_BINARY_DIR}/install_libraries.cmake COMPONENT libraries EXCLUDE_FROM_ALL)

install(DIRECTORY ${lockstep_BINARY_DIR}/include/lockstep/ DESTINATION ${include_dir}
  COMPONENT headers)

set(config_dir ${CMAKE_INSTALL_LIBDIR}/cmake/lockstep)
set(LOCKSTEP_INSTALLED_COMMAND ${CMAKE_INSTALL_BINDIR}/lockstep)
install(TARGETS lockstep_plugin lockstep_recorder EXPORT lockstepTargets
  ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT development)
install(EXPORT lockstepTargets NAMESPACE lockstep:: DESTINATION ${config_dir} COMPONENT development)
configure_package_config_file(cmake/lockstepConfig.cmake.in
  ${CMAKE_CURRENT_BINARY_DIR}/lockstepConfig.cmake INSTALL_DESTINATION ${config_dir}
  PATH_VARS LOCKSTEP_INSTALLED_COMMAND)
write_basic_package_version_file(${CMAKE_CURRENT_BINARY_DIR}/lockstepConfigVersion.cmake
  COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/lockstepConfig.cmake
  ${CMAKE_CURRENT_BINARY_DIR}/lockstepConfigVersion.cmake cmake/lockstepTesting.cmake
  DESTINATION ${config_dir} COMPONENT development)
