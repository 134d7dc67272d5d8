// Expectations of kernels in every mode of the executor: the same bytes, the same bits of numbers,
// and no reports.
#pragma once

#include <vector>

#include "tests/cuda_backend/kernel_device.h"
#include "tests/cuda_backend/matrices/catch2.h"
#include "tests/cuda_backend/protocol_oracle.h"

namespace lockstep::cuda {

// written(device, place): the pages after the write, in each place that a launch may have.
template <class Written>
void expect_bytes_in_every_mode(const oracle::Bytes& expected, int hunts, Written written) {
  in_every_mode(
      [&](CheckMode mode, std::uint64_t seed) {
        KernelDevice device(mode, seed);
        for (const LaunchPlace& place : device.places())
          require_same(written(device, place), expected);
        device.expect_no_reports();
      },
      hunts);
}

// read(device): numbers; num_wrong(numbers): those out of bounds.
template <class Read, class NumWrong>
void expect_numbers_in_every_mode(int hunts, Read read, NumWrong num_wrong) {
  std::vector<float> first;
  in_every_mode(
      [&](CheckMode mode, std::uint64_t seed) {
        KernelDevice device(mode, seed);
        const std::vector<float> found = read(device);
        if (mode == CheckMode::fast) {
          first = found;
          CHECK(num_wrong(found) == 0);
        }
        CHECK((found == first));  // bit for bit in every mode
        device.expect_no_reports();
      },
      hunts);
}

}  // namespace lockstep::cuda
