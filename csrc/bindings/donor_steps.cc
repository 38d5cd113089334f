// Python bindings of the donor codec's step mode. Arrays must have the exact dtype and shape, otherwise a ValueError
// names the one that has not; those of a coder are copied. Coding releases the GIL.
#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bindings/model.h"
#include "bindings/spans.h"
#include "donor/steps/steps.h"

namespace py = pybind11;
using namespace kvstore;
using namespace kvstore::bindings;
namespace steps = kvstore::donor::steps;

namespace {

const ArrayChecks kChecks("donor steps");
constexpr std::size_t kTables = steps::kClasses + steps::kScales;

// freqs: [kTables, kSymbols]
void take_freqs(steps::Coder& coder, const std::uint16_t* freqs) {
  std::vector<std::uint16_t> wide(kTables * rans::Tables::kSymbols, 0);
  for (std::size_t i = 0; i < kTables; ++i)
    std::copy_n(freqs + i * steps::kSymbols, steps::kSymbols, wide.data() + i * rans::Tables::kSymbols);
  // Symbols of the first tables are classes.
  for (std::size_t i = 0; i < steps::kClasses; ++i)
    for (std::size_t s = steps::kClasses; s < steps::kSymbols; ++s)
      if (freqs[i * steps::kSymbols + s] != 0) kChecks.refuse("freqs: a class of 16 or more has a frequency");
  if (!coder.tables.build(wide.data(), kTables, 12)) kChecks.refuse("freqs: every row must sum to 4096");
}

// Whether every number up to its limit, and escapes, have a frequency.
void check_limits(const steps::Coder& coder, const std::uint16_t* freqs) {
  for (std::size_t i = 0; i < steps::kScales; ++i) {
    const std::uint16_t* const row = freqs + (steps::kClasses + i) * steps::kSymbols;
    if (!row[steps::kEscape]) kChecks.refuse("freqs: escapes have no frequency");
    for (int n = 0; n <= coder.limits[i]; ++n)
      if (!row[steps::kLargest + n] || !row[steps::kLargest - n])
        kChecks.refuse("limits: a number within the limit has no frequency");
  }
}

std::shared_ptr<steps::Coder> build(const py::array& freqs, const py::array& costs, const py::array& limits,
                                    const py::array& expected, const py::array& bounds) {
  auto made = std::make_shared<steps::Coder>();
  const auto* const rows = kChecks.needed<std::uint16_t>(freqs, "freqs", {kTables, steps::kSymbols});
  take_freqs(*made, rows);
  std::copy_n(kChecks.needed<std::int32_t>(costs, "costs", {steps::kScales, steps::kSizes}),
              steps::kScales * steps::kSizes, made->costs[0]);
  std::copy_n(kChecks.needed<std::uint8_t>(limits, "limits", {steps::kScales}), steps::kScales, made->limits);
  std::copy_n(kChecks.needed<std::int64_t>(expected, "expected", {steps::kClasses - 1}), steps::kClasses - 1,
              made->expected);
  std::copy_n(kChecks.needed<std::int64_t>(bounds, "bounds", {steps::kShifts - 1}), steps::kShifts - 1, made->bounds);
  kChecks.range(made->limits, steps::kScales, 0, steps::kLargest, "limits");
  check_limits(*made, rows);
  kChecks.range(made->expected, steps::kClasses - 1, 0, 1 << 16, "expected");
  kChecks.range(made->bounds, steps::kShifts - 1, 0, 1 << 22, "bounds");
  return made;
}

// shapes: [layers, 3]: heads, key_dim, value_dim
steps::Parts parts_of(const py::array& shapes) {
  steps::Parts parts;
  for (const predict::LayerShape& shape : layers_of(kChecks, shapes)) {
    for (const std::size_t dim : {shape.key_dim, shape.value_dim}) {
      predict::Part part;
      part.heads = shape.heads;
      part.dim = dim;
      part.width = shape.heads * dim;
      parts.push_back(std::move(part));
    }
  }
  return parts;
}

struct Call {
  steps::Parts parts;
  SpansCall spans;

  Call(const py::array& shapes, std::size_t count, const py::array& table, const py::array& runs,
       const py::list& tables, const py::array& angles, const MaybeLevel& level)
      : parts(parts_of(shapes)), spans(kChecks, parts, 0, count, table, runs, tables, angles, false, level) {
    std::size_t widest = 0;
    for (const predict::Part& part : parts) widest = std::max(widest, part.width);
    if (donor::covered(spans.block) > (std::size_t{1} << 30) / widest)
      kChecks.refuse("a block has more values than can be coded at once");
  }
};

// The bytes of each layer; None if `out` is too short.
py::object encode(const steps::Coder& coder, const py::array& shapes, std::size_t count, const py::array& rows,
                  const py::array& spans, const py::list& donors, const py::array& angles, int quarters,
                  const py::buffer& out, const MaybeLevel& level) {
  const Call call(shapes, count, rows, spans, donors, angles, level);
  if (quarters != steps::kNothing && (quarters < -steps::kMostQuarters || quarters > steps::kMostQuarters))
    kChecks.refuse("quarters: expected a number from -200 to 200");
  const Memory memory(out, true);
  std::vector<std::uint64_t> sizes(call.parts.size() / 2);
  const bool fits = unlocked([&] {
    return steps::encode(coder, call.parts, call.spans.block, quarters, memory.data(), memory.size(), sizes.data(),
                         call.spans.twin);
  });
  return sizes_if(fits, sizes);
}

// What is damaged, or None.
std::optional<std::string> decode(const steps::Coder& coder, const py::array& shapes, std::size_t count,
                                  const py::array& rows, const py::array& spans, const py::list& donors,
                                  const py::array& angles, const py::buffer& payload,
                                  const std::vector<std::uint64_t>& sizes, std::size_t wanted,
                                  const MaybeLevel& level) {
  const Call call(shapes, count, rows, spans, donors, angles, level);
  check_layers(sizes, call.parts.size() / 2);
  const Memory memory(payload, false);
  return damage("donor", unlocked([&] {
    return steps::decode(coder, call.parts, call.spans.block, memory.data(), memory.size(), sizes.data(), wanted,
                         call.spans.twin);
  }));
}

}  // namespace

PYBIND11_MODULE(_donor_steps, m) {
  m.doc() = "The donor codec's step mode; see csrc/donor/steps/steps.h.";
  py::class_<steps::Coder, std::shared_ptr<steps::Coder>>(m, "Coder")
      .def(py::init(&build), py::kw_only(), py::arg("freqs"), py::arg("costs"), py::arg("limits"), py::arg("expected"),
           py::arg("bounds"));
  m.def("encode", &encode, py::arg("coder"), py::arg("shapes"), py::arg("count"), py::arg("rows"), py::arg("spans"),
        py::arg("donors"), py::arg("angles"), py::arg("quarters"), py::arg("out"), py::arg("level") = py::none());
  m.def("decode", &decode, py::arg("coder"), py::arg("shapes"), py::arg("count"), py::arg("rows"), py::arg("spans"),
        py::arg("donors"), py::arg("angles"), py::arg("payload"), py::arg("sizes"), py::arg("wanted"),
        py::arg("level") = py::none());
}
