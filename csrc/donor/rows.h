// The rows of donors as a prediction of a block's: what the exact core and the step mode both start from.
#pragma once

#include <cstddef>
#include <cstdint>

#include "donor/donor.h"
#include "donor/kernels.h"

namespace kvstore::donor {

// Writes part `number`, of so many heads, of all covered rows to `to`, one row after the other: the donors' values,
// keys rotated if their span says so, 0 for what is not finite. scratch: for a row of a head.
void load(const Kernels& run, const Block& block, std::size_t heads, std::size_t dim, std::size_t number,
          std::uint16_t* scratch, std::uint16_t* to);

}  // namespace kvstore::donor
