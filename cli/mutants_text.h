// What a search for mutants found, for a person and as JSON.
#pragma once

#include <string>
#include <vector>

#include "properties/mutants/mutant_search.h"

namespace lockstep {

std::string list_text(const std::vector<const Mutant*>& mutants);
std::string mutants_text(const std::vector<MutantReport>& reports);
std::string mutants_json(const std::vector<MutantReport>& reports);
// DIR/ID.case.jsonl for each that was caught by a case.
Result<void> save_cases(const std::string& dir, const std::vector<MutantReport>& reports);

}  // namespace lockstep
