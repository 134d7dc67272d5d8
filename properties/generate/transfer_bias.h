// What the cases are like in which a mutant of a transfer is searched for.
#pragma once

#include <cstdint>

namespace lockstep {

enum class TransferSubject : std::uint8_t { pair, holds, connectors };

struct TransferBias {
  TransferSubject subject = TransferSubject::pair;
  bool fails_requests = false;  // a load that fails ends its request, which is prefilled again
  bool tight = false;           // the decode engine's pool holds one long request and a bit
  bool has_pages = false;       // both engines have backends: real pages are sent
};

}  // namespace lockstep
