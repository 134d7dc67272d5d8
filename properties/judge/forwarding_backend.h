// A backend that passes everything on to another: what stands between a run and its device, to ask
// for more or to keep what was answered, overrides execute() and nothing else.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "sim/protocol/backend.h"

namespace lockstep {

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
  std::vector<std::string> not_checked() const override { return inner_->not_checked(); }

 protected:
  const std::unique_ptr<Backend> inner_;
};

}  // namespace lockstep
