// Units of the kernels: 64-bit words of the protocol (sim/protocol/backend.h), accesses of 1 to 16
// bytes, and items of flat launches. Device code that every kernel file includes.
#pragma once

#include "cuda_backend/kernels/params.h"
#include "cuda_backend/simt/simt.h"

// The plain build for the CPU takes eight words at a time.
#if !SIMT_ON_GPU && !SIMT_IS_CHECKED
#include "base/wide_words.h"
#define KERNELS_HAVE_WIDE_WORDS LS_HAVE_WIDE_WORDS
#define KERNELS_HAVE_FOUR_WORDS LS_HAVE_FOUR_WORDS
#else
#define KERNELS_HAVE_WIDE_WORDS 0
#define KERNELS_HAVE_FOUR_WORDS 0
#endif

namespace lockstep::cuda {
namespace SIMT_VARIANT {

inline constexpr std::uint64_t kGolden = 0x9E3779B97F4A7C15ull;

// splitmix64, the protocol's mix().
__device__ __forceinline__ std::uint64_t mix(std::uint64_t x) {
  x += kGolden;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

#if KERNELS_HAVE_WIDE_WORDS
LS_WIDE_WORDS inline WideWords mix8(WideWords x) {
  x += kGolden;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}
#endif

// Loads a row into the caches of the plain build's CPU; elsewhere it does nothing.
__device__ __forceinline__ void prefetch_row([[maybe_unused]] const std::byte* row,
                                             [[maybe_unused]] std::int32_t bytes) {
#if KERNELS_HAVE_WIDE_WORDS
  for (std::int32_t at = 0; at < bytes; at += 64) __builtin_prefetch(row + at);
#endif
}

__device__ __forceinline__ std::uint64_t coordinate(std::int32_t layer, std::uint32_t part,
                                                    std::uint32_t head) {
  return mix((std::uint64_t(std::uint32_t(layer)) << 32) | (part << 16) | head);
}

// Word `index` of a row, before shape(); row_key = mix(content ^ coordinate).
__device__ __forceinline__ std::uint64_t row_word(std::uint64_t row_key, std::uint64_t index) {
  return mix(row_key + (index + 1) * kGolden);
}

__device__ __forceinline__ std::uint32_t divide(std::uint32_t n, const Divisor& by) {
  return std::uint32_t(((std::uint64_t(n) * by.multiplier >> 32) + n) >> by.shift);
}
__device__ __forceinline__ std::int64_t divide_slot(Slot slot, const Divisor& by) {
  if (std::uint64_t(slot) >> 32 == 0) return divide(std::uint32_t(slot), by);
  return slot / std::int64_t(by.value);
}

// Source rows of tokens (TokenRows). The slot that row i is written to; below zero: none, since its
// token completes no row or has the slot of padding.
__device__ __forceinline__ Slot slot_of_row(const TokenRows& rows, const Slot* slots,
                                            std::uint32_t i) {
  const std::uint32_t token = divide(i, rows.rows_per_token);
  const Slot slot = slots[token];
  const std::uint32_t tokens = rows.tokens_per_row.value, several = rows.rows_per_token.value;
  if (slot < 0) return slot;
  if (tokens == 1) return slot * several + (i - token * several);
  const Slot complete = divide_slot(slot + 1, rows.tokens_per_row);
  return complete * tokens == slot + 1 ? complete - 1 : -1;
}
// The content of row i: rule (26).
__device__ __forceinline__ std::uint64_t content_of_row(const TokenRows& rows,
                                                        const std::uint64_t* contents,
                                                        std::uint32_t i) {
  const std::uint32_t token = divide(i, rows.rows_per_token);
  const std::uint32_t number = i - token * rows.rows_per_token.value;
  return number == 0 ? contents[token] : mix(contents[token] + number);
}

// Calls `f` with a zero of the type that has `unit_bytes` bytes: 16, 8, 4, 2 or 1.
template <class F>
__device__ __forceinline__ void with_unit(std::int32_t unit_bytes, const F& f) {
  if (unit_bytes == 16) return f(simt::vec16{});
  if (unit_bytes == 8) return f(std::uint64_t{});
  if (unit_bytes == 4) return f(std::uint32_t{});
  if (unit_bytes == 2) return f(std::uint16_t{});
  return f(std::uint8_t{});
}

// Flat launches: thread t of n handles items t, t + n, t + 2n, ...
__device__ __forceinline__ std::uint32_t first_item() {
  return blockIdx.x * blockDim.x + threadIdx.x;
}
__device__ __forceinline__ std::uint32_t item_stride() { return gridDim.x * blockDim.x; }

template <class T, bool kAnyBytes>
__device__ __forceinline__ std::uint64_t load_piece(const std::byte* p) {
  if constexpr (kAnyBytes)
    return simt::load_any(reinterpret_cast<const T*>(p));
  else
    return *reinterpret_cast<const T*>(p);
}
// The low `bytes` (1 to 8) bytes of a word at p, in accesses of `unit` bytes; p and bytes are
// multiples of the unit (or the unit is 16, p a multiple of 8 and bytes 8). kAnyBytes: they may be
// undefined, for fingerprints.
template <bool kAnyBytes = false>
__device__ __forceinline__ std::uint64_t load_word(const std::byte* p, std::int32_t bytes,
                                                   std::int32_t unit) {
  if (unit >= 8) return load_piece<std::uint64_t, kAnyBytes>(p);
  std::uint64_t word = 0;
  for (std::int32_t at = 0; at < bytes; at += unit) {
    const std::uint64_t piece = unit == 4   ? load_piece<std::uint32_t, kAnyBytes>(p + at)
                                : unit == 2 ? load_piece<std::uint16_t, kAnyBytes>(p + at)
                                            : load_piece<std::uint8_t, kAnyBytes>(p + at);
    word |= piece << (8 * at);
  }
  return word;
}

__device__ __forceinline__ void store_word(std::byte* p, std::uint64_t word, std::int32_t bytes,
                                           std::int32_t unit) {
  if (unit >= 8) {
    *reinterpret_cast<std::uint64_t*>(p) = word;
    return;
  }
  for (std::int32_t at = 0; at < bytes; at += unit) {
    const std::uint64_t piece = word >> (8 * at);
    if (unit == 4) {
      *reinterpret_cast<std::uint32_t*>(p + at) = std::uint32_t(piece);
    } else if (unit == 2) {
      *reinterpret_cast<std::uint16_t*>(p + at) = std::uint16_t(piece);
    } else {
      *reinterpret_cast<std::uint8_t*>(p + at) = std::uint8_t(piece);
    }
  }
}

// Two words as 16 bytes, and back.
__device__ __forceinline__ simt::vec16 join_words(std::uint64_t low, std::uint64_t high) {
  return simt::make_vec16(std::uint32_t(low), std::uint32_t(low >> 32), std::uint32_t(high),
                          std::uint32_t(high >> 32));
}
__device__ __forceinline__ std::uint64_t low_word(simt::vec16 v) {
  return simt::word(v, 0) | std::uint64_t(simt::word(v, 1)) << 32;
}
__device__ __forceinline__ std::uint64_t high_word(simt::vec16 v) {
  return simt::word(v, 2) | std::uint64_t(simt::word(v, 3)) << 32;
}

// Adds every thread's value to *sum. CTAs of whole warps reduce first; smaller CTAs (the CPU's
// choice, where a thread is cheaper than a shuffle) add thread by thread. Integers: any order, the
// same sum.
__device__ __forceinline__ void add_to_sum(unsigned long long* sum, std::uint64_t value) {
  unsigned long long total = value;
  if (blockDim.x % 32 == 0) {
    total = simt::warp_sum(total);
    if (threadIdx.x % 32 != 0) return;
  }
  atomicAdd(sum, total);
}

// The address of a row.
__device__ __forceinline__ std::byte* row_address(const RowCache& cache, std::int64_t block,
                                                  std::int64_t offset, std::int64_t head) {
  return cache.base + block * cache.block_stride + offset * cache.token_stride +
         head * cache.head_stride;
}
// A row of a host page on the host, and in the hot region of a batch row.
__device__ __forceinline__ std::byte* host_row_address(const AwayRows& rows, std::int64_t row) {
  const std::int64_t block = divide_slot(row, rows.block_size);
  return rows.host + block * rows.host_block_stride +
         (row - block * rows.block_size.value) * rows.row_bytes;
}
__device__ __forceinline__ std::byte* hot_row_address(const AwayRows& rows, std::int32_t row,
                                                      std::uint32_t slot) {
  const std::uint32_t entry = divide(slot, rows.block_size);
  return rows.hot + rows.hot_table[row * rows.hot_width + entry] * rows.hot_block_stride +
         (slot - entry * rows.block_size.value) * rows.row_bytes;
}
__device__ __forceinline__ std::int64_t host_row_of(const AwayRows& rows, std::int32_t row,
                                                    std::uint32_t position) {
  const std::uint32_t entry = divide(position, rows.block_size);
  return std::int64_t(rows.host_table[row * rows.host_width + entry]) * rows.block_size.value +
         (position - entry * rows.block_size.value);
}
// The row in the region if it is there, else on the host.
__device__ __forceinline__ const std::byte* away_row(const AwayRows& rows, std::int32_t row,
                                                     std::uint32_t position) {
  const std::int64_t host_row = host_row_of(rows, row, position);
  const std::int32_t slot = rows.places[std::int64_t(row) * rows.num_positions + position];
  if (slot >= 0 && rows.held[std::int64_t(row) * rows.num_slots + slot] == host_row)
    return hot_row_address(rows, row, slot);
  return host_row_address(rows, host_row);
}
// Where the row of a position is stored: a kernel block and an offset in it, or, for a row of
// host pages that is not on the device, an address.
struct RowPlace {
  std::int32_t block, offset;
  const std::byte* away;  // null: it is on the device
};
// Looks the position up in the row's block table. Sinks have blocks of their own before it.
__device__ __forceinline__ RowPlace place_of_position(const RowCache& cache, std::int32_t row,
                                                      std::uint32_t position) {
  const std::uint32_t index = divide(position, cache.block_size);
  const std::uint32_t sinks = cache.sink_blocks;
  RowPlace place{0, std::int32_t(position - index * cache.block_size.value), nullptr};
  place.block = index < sinks
                    ? std::int32_t(cache.first_sink_block + index)
                    : cache.table[row * cache.table_width + (cache.is_ring ? 0 : index - sinks)];
  if (cache.away != nullptr && place.block == 0) place.away = away_row(*cache.away, row, position);
  return place;
}
// The K row of head 0 at a position.
__device__ __forceinline__ const std::byte* key_of_position(const RowCache& cache, std::int32_t row,
                                                            std::uint32_t position) {
  const RowPlace place = place_of_position(cache, row, position);
  return place.away != nullptr ? place.away : row_address(cache, place.block, place.offset, 0);
}

}  // namespace SIMT_VARIANT
}  // namespace lockstep::cuda
