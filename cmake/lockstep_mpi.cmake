# SPDX-License-Identifier: Apache-2.0
# MPI, for `mpirun -n 3 lockstep fuzz`: LOCKSTEP_HAVE_MPI says whether it is built in. Debian has it in
# libopenmpi-dev and openmpi-bin.
set(LOCKSTEP_MPI AUTO CACHE STRING
  "Spread `lockstep fuzz` over MPI's ranks: ON, OFF, or AUTO (where MPI is found)")
set(LOCKSTEP_HAVE_MPI OFF)
if(LOCKSTEP_MPI)
  if(LOCKSTEP_MPI STREQUAL "AUTO")
    find_package(MPI QUIET COMPONENTS CXX)
  else()
    find_package(MPI REQUIRED COMPONENTS CXX)
  endif()
  if(MPI_CXX_FOUND)
    set(LOCKSTEP_HAVE_MPI ON)
    message(STATUS "MPI ${MPI_CXX_VERSION}: ${MPIEXEC_EXECUTABLE}")
  else()
    message(STATUS "No MPI: `lockstep fuzz` runs in one process, or by --shard")
  endif()
endif()
