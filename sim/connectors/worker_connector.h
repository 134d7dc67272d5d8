// A KV connector with its workers: what the scheduler asks, and what comes back with each step.
#pragma once

#include "reference/types/kv_connector.h"

namespace lockstep {

class WorkerConnector : public KVConnector {
 public:
  // Once a step, after it has been decided: what will have ended when it is over.
  virtual KVConnectorOutput report() = 0;
  // Something may still change without anything running: a transfer, or an answer that is due.
  virtual bool is_busy() const = 0;
};

}  // namespace lockstep
