// Python bindings of the donor codec's step mode. Arrays must have the exact dtype and shape, otherwise a ValueError
// names the one that has not; those of a coder are copied. Coding releases the GIL.
#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "bindings/model.h"
#include "donor/steps/steps.h"

namespace py = pybind11;
using namespace kvstore;
using namespace kvstore::bindings;
namespace steps = kvstore::donor::steps;

namespace {

std::shared_ptr<steps::Coder> build(const py::array& freqs, const py::array& costs, const py::array& limits,
                                    const py::array& expected, const py::array& bounds) {
  constexpr std::size_t tables = steps::kClasses + steps::kScales;
  auto made = std::make_shared<steps::Coder>();
  const auto* const rows = needed<std::uint16_t>(freqs, "freqs", {tables, steps::kSymbols});
  std::vector<std::uint16_t> wide(tables * rans::Tables::kSymbols, 0);
  for (std::size_t i = 0; i < tables; ++i)
    std::copy_n(rows + i * steps::kSymbols, steps::kSymbols, wide.data() + i * rans::Tables::kSymbols);
  // Symbols of the first tables are classes.
  for (std::size_t i = 0; i < steps::kClasses; ++i)
    for (std::size_t s = steps::kClasses; s < steps::kSymbols; ++s)
      if (rows[i * steps::kSymbols + s] != 0) throw std::invalid_argument("freqs: a class that there is not");
  if (!made->tables.build(wide.data(), tables, 12)) throw std::invalid_argument("freqs: expected sums of 4096");
  std::copy_n(needed<std::int32_t>(costs, "costs", {steps::kScales, steps::kSizes}), steps::kScales * steps::kSizes,
              made->costs[0]);
  std::copy_n(needed<std::uint8_t>(limits, "limits", {steps::kScales}), steps::kScales, made->limits);
  std::copy_n(needed<std::int64_t>(expected, "expected", {steps::kClasses - 1}), steps::kClasses - 1, made->expected);
  std::copy_n(needed<std::int64_t>(bounds, "bounds", {steps::kShifts - 1}), steps::kShifts - 1, made->bounds);
  for (std::size_t i = 0; i < steps::kScales; ++i)
    for (int n = 0; n <= steps::kLargest + 1; ++n) {
      const std::size_t row = (steps::kClasses + i) * steps::kSymbols;
      const bool known = n <= made->limits[i] && n <= steps::kLargest;
      if (known && (!rows[row + steps::kLargest + n] || !rows[row + steps::kLargest - n]))
        throw std::invalid_argument("limits: a number without a frequency");
      if (!rows[row + steps::kEscape]) throw std::invalid_argument("freqs: escapes without a frequency");
    }
  if (*std::max_element(made->limits, made->limits + steps::kScales) > steps::kLargest)
    throw std::invalid_argument("limits: expected at most 15");
  for (const std::int64_t v : made->expected)
    if (v < 0 || v > 1 << 16) throw std::invalid_argument("expected: expected 0..2**16");
  for (const std::int64_t v : made->bounds)
    if (v < 0 || v > 1 << 22) throw std::invalid_argument("bounds: expected 0..2**22");
  return made;
}

// The arguments that both functions below share, checked. shapes: [layers, 3]: heads, key_dim, value_dim; spans:
// [spans, 3]: first row, rows, which angles; donors: a row table of each.
struct Call {
  steps::Parts parts;
  std::vector<Rows> rows;
  std::vector<std::vector<Rows>> donors;
  std::vector<donor::Span> spans;
  donor::Block block;
  Level twin;

  Call(const py::array& shapes, std::size_t count, const py::array& table, const py::array& runs,
       const py::list& tables, const py::array& angles, const std::optional<std::string>& level)
      : twin(level_of(level)) {
    if (shapes.ndim() != 2 || shapes.shape(0) < 1) throw std::invalid_argument("shapes: expected [layers, 3]");
    const auto layers = static_cast<std::size_t>(shapes.shape(0)), number = static_cast<std::size_t>(tables.size());
    const std::int64_t* const dims = needed<std::int64_t>(shapes, "shapes", {layers, 3});
    std::size_t widest = 0;
    for (std::size_t i = 0; i < 2 * layers; ++i) {
      const std::int64_t heads = dims[i / 2 * 3], dim = dims[i / 2 * 3 + 1 + i % 2];
      if (heads < 1 || dim < 1 || heads > 1 << 20 || dim > 1 << 20 || heads * dim > 1 << 20)
        throw std::invalid_argument("shapes: expected 1..2**20");
      predict::Part part;
      part.heads = static_cast<std::size_t>(heads);
      part.dim = static_cast<std::size_t>(dim);
      part.width = part.heads * part.dim;
      widest = std::max(widest, part.width);
      parts.push_back(std::move(part));
    }
    rows = rows_of(table, parts.size());
    if (angles.ndim() != 3 || angles.shape(1) != 2) throw std::invalid_argument("angles: expected [angles, 2, half]");
    const auto turns = static_cast<std::size_t>(angles.shape(0)), half = static_cast<std::size_t>(angles.shape(2));
    const auto* const given = needed<std::int16_t>(angles, "angles", {turns, 2, half});
    for (std::size_t i = 0; i < turns * 2 * half; ++i)
      if (given[i] < -(1 << 14) || given[i] > 1 << 14) throw std::invalid_argument("angles: expected -16384..16384");
    const std::int64_t* const ranges = needed<std::int64_t>(runs, "spans", {number, 3});
    const auto all = static_cast<std::int64_t>(count);
    std::int64_t end = 0, covered = 0;
    for (std::size_t i = 0; i < number; ++i) {
      donors.push_back(rows_of(py::cast<py::array>(tables[i]), parts.size()));
      const std::int64_t first = ranges[3 * i], length = ranges[3 * i + 1], turn = ranges[3 * i + 2];
      if (first < end || length < 1 || length > all || first > all - length)
        throw std::invalid_argument("spans: expected disjoint rising runs of the block's rows");
      if (turn >= static_cast<std::int64_t>(turns)) throw std::invalid_argument("spans: angles that there are not");
      if (turn >= 0)
        for (std::size_t p = 0; p < parts.size(); p += 2)
          if (parts[p].dim != 2 * half) throw std::invalid_argument("angles: expected half of every key's size");
      end = first + length;
      covered += length;
      spans.push_back({static_cast<std::size_t>(first), static_cast<std::size_t>(length), turn, nullptr});
    }
    if (number == 0) throw std::invalid_argument("spans: expected at least one");
    if (covered > (std::int64_t{1} << 30) / static_cast<std::int64_t>(widest))
      throw std::invalid_argument("donor: a block has more values than can be coded at once");
    for (std::size_t i = 0; i < number; ++i) spans[i].donor = donors[i].data();
    block = {spans.data(), number, given, half, rows.data(), 0, false};
  }
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;
};

// The bytes of each layer; None where `out` is too short.
py::object encode(const steps::Coder& coder, const py::array& shapes, std::size_t count, const py::array& rows,
                  const py::array& spans, const py::list& donors, const py::array& angles, int quarters,
                  const py::buffer& out, const std::optional<std::string>& level) {
  const Call call(shapes, count, rows, spans, donors, angles, level);
  if (quarters != steps::kNothing && (quarters < -steps::kMostQuarters || quarters > steps::kMostQuarters))
    throw std::invalid_argument("quarters: expected at most 200 either way");
  const py::buffer_info memory = contiguous(out, true);
  auto* const begin = static_cast<std::uint8_t*>(memory.ptr);
  const auto capacity = static_cast<std::size_t>(memory.size * memory.itemsize);
  std::vector<std::uint64_t> sizes(call.parts.size() / 2);
  bool fits = false;
  {
    const py::gil_scoped_release release;
    fits = steps::encode(coder, call.parts, call.block, quarters, begin, capacity, sizes.data(), call.twin);
  }
  if (!fits) return py::none();
  return py::tuple(py::cast(sizes));
}

// What is damaged, or None.
std::optional<std::string> decode(const steps::Coder& coder, const py::array& shapes, std::size_t count,
                                  const py::array& rows, const py::array& spans, const py::list& donors,
                                  const py::array& angles, const py::buffer& payload,
                                  const std::vector<std::uint64_t>& sizes, std::size_t wanted,
                                  const std::optional<std::string>& level) {
  const Call call(shapes, count, rows, spans, donors, angles, level);
  if (sizes.size() * 2 != call.parts.size()) throw std::invalid_argument("sizes: expected one a layer");
  const py::buffer_info memory = contiguous(payload, false);
  const auto* const begin = static_cast<const std::uint8_t*>(memory.ptr);
  const auto nbytes = static_cast<std::size_t>(memory.size * memory.itemsize);
  const char* wrong = nullptr;
  {
    const py::gil_scoped_release release;
    wrong = steps::decode(coder, call.parts, call.block, begin, nbytes, sizes.data(), wanted, call.twin);
  }
  return wrong ? std::optional<std::string>(wrong) : std::nullopt;
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
