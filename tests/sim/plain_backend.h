// A backend in plain loops, written from the rules of sim/protocol/backend.h alone: for tests of
// the simulator where no kernel is needed, and as a third opinion on the protocol. Attention caches
// without packing and state caches; NHD and HND; K and V of a block in its page, or apart as
// FlashAttention has them; LBNHC and LBHNC.
#pragma once

#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

#include "sim/protocol/backend.h"

namespace lockstep {

class PlainBackend : public Backend {
 public:
  explicit PlainBackend(const BackendConfig& config);

  std::string_view name() const override { return "plain"; }
  std::string device() const override { return "plain loops"; }
  Result<void> execute(const StepProgram& program, StepReadback& readback) override;
  Result<void> fingerprint_pages(std::span<const PageId> pages,
                                 std::span<Fingerprint> fingerprints) override;
  Result<std::vector<std::uint8_t>> read_page(PageId page) override;
  std::optional<Writer> who_wrote(PageId page, std::int64_t byte) override;
  Result<void> fingerprint_host_blocks(std::span<const HostBlockId> hosts,
                                       std::span<Fingerprint> fingerprints) override;
  Result<std::vector<std::uint8_t>> read_host_block(std::int32_t group, HostBlockId host) override;
  Result<void> write_host_block(std::int32_t group, HostBlockId host,
                                std::span<const std::uint8_t> bytes) override;

  // The raw bytes, for tests that spoil them.
  std::vector<std::uint8_t>& tensor(std::int32_t index) { return tensors_[index]; }
  std::vector<std::vector<std::int32_t>>& tables(std::int32_t group) { return tables_[group]; }
  std::int64_t page_bytes(std::int32_t tensor) const;
  struct Layer {
    int group = 0, tensor = 0, parts = 0, heads = 0;
    const KVCacheSpec* spec = nullptr;
    std::int64_t row_bytes = 0;
    bool apart = false;  // all K first, then all V
  };
  const std::vector<Layer>& layers() const { return layers_; }
  // The first byte of a row in its tensor.
  std::int64_t row_offset(const Layer& layer, std::int64_t block, int part, std::int64_t token,
                          int head) const;

 private:
  void copy_block(std::int32_t group, BlockId source, BlockId target);
  void poison_block(std::int32_t block, std::uint64_t kind);
  void poison_byte(int tensor, std::int64_t offset, std::uint64_t kind);
  // visit(tensor, first byte, bytes): what a layer really uses in a block.
  template <class Visit>
  void for_real_bytes_of(const Layer& layer, std::int64_t block, Visit visit) const {
    std::int64_t offset = block * page_bytes(layer.tensor);
    for (const StateTensorSpec& state : layer.spec->states) {
      visit(layer.tensor, offset, state_bytes(state));
      offset += state_bytes(state);
    }
    for (int part = 0; part < layer.parts; ++part)
      for (std::int64_t token = 0; token < layer.spec->block_size; ++token)
        for (int head = 0; head < layer.heads; ++head)
          visit(layer.tensor, row_offset(layer, block, part, token, head), layer.row_bytes);
  }
  template <class Visit>
  void for_real_bytes(int group, std::int64_t block, Visit visit) const {
    for (const Layer& layer : layers_)
      if (layer.group == group) for_real_bytes_of(layer, block, visit);
  }
  struct Piece {
    int tensor = 0;
    std::int64_t at = 0, size = 0;
  };
  std::vector<Piece> host_pieces(int group, std::int64_t block) const;
  void make_host_tier();
  void transfer(std::span<const HostTransfer> transfers, bool to_host);
  static std::int64_t state_bytes(const StateTensorSpec& state);
  static std::uint8_t poison_of(std::uint64_t kind, std::uint64_t tensor, std::uint64_t page,
                                std::uint64_t byte);
  static Fingerprint sum_of(const std::vector<std::uint8_t>& bytes);
  void update_state(const StepProgram& program, const StateUpdate& update);
  void write_rows(const StepProgram& program, StepReadback& readback);
  std::int64_t row_of(const Layer& layer, int row, std::int64_t position, int part, int head) const;
  std::uint64_t digest(const AttentionProbe& probe) const;
  void attend(const AttentionQuery& query, std::vector<float>& outputs) const;
  void extract(const RowExtraction& extraction, std::vector<std::uint8_t>& rows) const;
  double element(const Layer& layer, std::int64_t row_offset, std::int64_t i) const;

  BackendConfig config_;
  std::vector<std::vector<std::uint8_t>> tensors_;
  std::vector<Layer> layers_;
  std::vector<std::vector<std::vector<std::int32_t>>> tables_;  // [group][row]
  std::vector<std::vector<std::uint8_t>> host_blocks_;
  std::int64_t step_ = 0;
};

}  // namespace lockstep
