// A backend that passes every call on to another one. Code between a run and its backend derives
// from it and overrides only the calls that it watches or changes.
//
// Invariants
// (1) Every virtual function of Backend is forwarded. A new one has to be added here, or the
//     default of the base class hides the inner backend's answer.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "sim/protocol/backend.h"

namespace lockstep {

// REQUIRES: `inner` is not null.
class ForwardingBackend : public Backend {
 public:
  explicit ForwardingBackend(std::unique_ptr<Backend> inner) : inner_(std::move(inner)) {}

  std::string_view name() const override { return inner_->name(); }
  std::string device() const override { return inner_->device(); }
  Result<void> execute(const StepProgram& program, StepReadback& readback) override {
    return inner_->execute(program, readback);
  }
  Result<void> fingerprint_pages(std::span<const PageId> pages,
                                 std::span<Fingerprint> fingerprints) override {
    return inner_->fingerprint_pages(pages, fingerprints);
  }
  Result<std::vector<std::uint8_t>> read_page(PageId page) override {
    return inner_->read_page(page);
  }
  std::optional<Writer> who_wrote(PageId page, std::int64_t byte) override {
    return inner_->who_wrote(page, byte);
  }
  Result<void> fingerprint_host_blocks(std::span<const HostBlockId> hosts,
                                       std::span<Fingerprint> fingerprints) override {
    return inner_->fingerprint_host_blocks(hosts, fingerprints);
  }
  Result<std::vector<std::uint8_t>> read_host_block(std::int32_t group, HostBlockId host) override {
    return inner_->read_host_block(group, host);
  }
  Result<void> write_host_block(std::int32_t group, HostBlockId host,
                                std::span<const std::uint8_t> bytes) override {
    return inner_->write_host_block(group, host, bytes);
  }
  std::vector<KernelStatistics> kernel_statistics() const override {
    return inner_->kernel_statistics();
  }
  GraphStatistics graph_statistics() const override { return inner_->graph_statistics(); }
  bool answers_queries() const override { return inner_->answers_queries(); }
  bool attends_to_ranges() const override { return inner_->attends_to_ranges(); }
  DType query_dtype() const override { return inner_->query_dtype(); }
  EngineWorker* engine_worker() override { return inner_->engine_worker(); }
  std::vector<std::string> not_checked() const override { return inner_->not_checked(); }

 protected:
  const std::unique_ptr<Backend> inner_;
};

// A backend that records whether a call failed, and in which step. A case whose backend failed is
// neither refused nor agreed: the judge reports it as `device`.
class WatchedBackend final : public ForwardingBackend {
 public:
  using ForwardingBackend::ForwardingBackend;

  bool has_failed() const { return has_failed_; }
  // The step of the last execute(); -1: none.
  std::int64_t last_step() const { return last_step_; }

  Result<void> execute(const StepProgram& program, StepReadback& readback) override {
    last_step_ = program.step;
    return noted(inner_->execute(program, readback));
  }
  Result<void> fingerprint_pages(std::span<const PageId> pages,
                                 std::span<Fingerprint> fingerprints) override {
    return noted(inner_->fingerprint_pages(pages, fingerprints));
  }
  Result<std::vector<std::uint8_t>> read_page(PageId page) override {
    return noted(inner_->read_page(page));
  }
  Result<void> fingerprint_host_blocks(std::span<const HostBlockId> hosts,
                                       std::span<Fingerprint> fingerprints) override {
    return noted(inner_->fingerprint_host_blocks(hosts, fingerprints));
  }
  Result<std::vector<std::uint8_t>> read_host_block(std::int32_t group, HostBlockId host) override {
    return noted(inner_->read_host_block(group, host));
  }
  Result<void> write_host_block(std::int32_t group, HostBlockId host,
                                std::span<const std::uint8_t> bytes) override {
    return noted(inner_->write_host_block(group, host, bytes));
  }

 private:
  // Notes a failure and passes the result on unchanged.
  template <class T>
  Result<T> noted(Result<T> result) {
    has_failed_ |= !result.has_value();
    return result;
  }

  bool has_failed_ = false;
  std::int64_t last_step_ = -1;
};

}  // namespace lockstep
