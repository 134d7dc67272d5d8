# SPDX-License-Identifier: Apache-2.0
# What a program of this project should not need from the machine that it is carried to is linked in,
# where the system has it as an archive: Debian has libcrypto, xxhash, zlib,
# Boost.Context and tcmalloc, and not fmt.
option(LOCKSTEP_STATIC "Link libcrypto, xxhash, zlib, Boost.Context and tcmalloc as archives, where found" ON)
if(LOCKSTEP_STATIC)
  find_library(LOCKSTEP_CRYPTO_ARCHIVE libcrypto.a)
  find_library(LOCKSTEP_XXHASH_ARCHIVE libxxhash.a)
  find_library(LOCKSTEP_ZLIB_ARCHIVE libz.a)
  find_library(LOCKSTEP_CONTEXT_ARCHIVE libboost_context.a)
  find_library(LOCKSTEP_MALLOC_ARCHIVE libtcmalloc_minimal.a)
  if(LOCKSTEP_CRYPTO_ARCHIVE)
    set(OPENSSL_USE_STATIC_LIBS ON)
  endif()
  if(LOCKSTEP_XXHASH_ARCHIVE)
    set(XXHASH_LIBRARY ${LOCKSTEP_XXHASH_ARCHIVE} CACHE FILEPATH "xxhash")
  endif()
  if(LOCKSTEP_ZLIB_ARCHIVE)
    set(ZLIB_LIBRARY ${LOCKSTEP_ZLIB_ARCHIVE} CACHE FILEPATH "zlib")
  endif()
  if(LOCKSTEP_CONTEXT_ARCHIVE)
    set(Boost_USE_STATIC_LIBS ON)
  endif()
endif()
