// The encoder's part of the module _lossy.
#pragma once

#include <pybind11/pybind11.h>

namespace kvstore::bindings {

void bind_lossy_encoder(pybind11::module_& m);

}  // namespace kvstore::bindings
