// Python bindings of the donor codec's exact core. Arrays of a model must have the exact dtype and shape, otherwise a
// ValueError names the one that has not; they are copied. Coding releases the GIL.
#include <pybind11/stl.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "bindings/model.h"
#include "donor/donor.h"

namespace py = pybind11;
using namespace kvstore;
using namespace kvstore::bindings;

namespace {

// The predictive codec's model with a reach of one layer, without bias and without a table of tokens.
struct Coder {
  std::unique_ptr<predict::Model> model;
  bool propagates;
};

std::shared_ptr<Coder> build(const py::array& shapes, const std::optional<py::array>& freqs,
                             const std::optional<Lists>& in_scale, const std::optional<Lists>& out_scale,
                             const std::optional<Lists>& fix, const std::optional<Lists>& weight,
                             const std::optional<py::array>& rope_fine, const std::optional<py::array>& rope_coarse) {
  if (shapes.ndim() != 2 || shapes.shape(1) != 3 || shapes.shape(0) < 1)
    throw std::invalid_argument("donor: shapes: expected [layers, 3]: heads, key_dim, value_dim");
  const auto parts = static_cast<std::size_t>(2 * shapes.shape(0));
  const std::int64_t* const dims = needed<std::int64_t>(shapes, "shapes", {parts / 2, 3});
  // Nothing is read of these but their shapes.
  Lists ones, zeros, scales, adapt;
  const Lists none(parts);
  std::int64_t first = 0;
  for (std::size_t i = 0; i < parts; ++i) {
    const std::int64_t heads = dims[i / 2 * 3], dim = dims[i / 2 * 3 + 1 + i % 2];
    if (heads < 1 || dim < 1 || heads > 1 << 20 || dim > 1 << 20 || heads * dim > 1 << 20)
      throw std::invalid_argument("donor: shapes: expected 1..2**20");
    const auto width = static_cast<py::ssize_t>(heads * dim);
    if (i < 2) first += width;
    py::array_t<float> one(width);
    std::fill_n(one.mutable_data(), width, 1.0f);
    py::array_t<std::int32_t> zero(width), three(3);
    std::fill_n(zero.mutable_data(), width, 0);
    std::fill_n(three.mutable_data(), 3, 0);
    py::array_t<std::int16_t> scale(width);
    std::fill_n(scale.mutable_data(), width, std::int16_t{0});
    ones.push_back(one);
    zeros.push_back(zero);
    scales.push_back(scale);
    adapt.push_back(three);
  }
  const py::array_t<std::int8_t> tokens(std::vector<py::ssize_t>{0, static_cast<py::ssize_t>(first)});
  predict::Arrays arrays{};
  arrays.reach = 1;
  take_base(arrays, shapes, in_scale.value_or(ones), out_scale.value_or(ones), scales, zeros, adapt, fix.value_or(none),
            weight ? &*weight : nullptr, tokens, rope_fine, rope_coarse);
  arrays.freqs = needed<std::uint16_t>(freqs, "freqs", {2 * predict::kClasses, predict::kSymbols});
  return std::make_shared<Coder>(Coder{std::make_unique<predict::Model>(arrays), weight.has_value()});
}

// The arguments that both functions below share, checked. spans: [spans, 3]: first row, rows, which angles; donors:
// [spans, 3, parts]: a row table of each.
struct Call {
  std::vector<Rows> rows;
  std::vector<std::vector<Rows>> donors;
  std::vector<donor::Span> spans;
  donor::Block block;
  Level twin;

  Call(const Coder& coder, std::int64_t start, std::size_t count, const py::array& table, const py::array& runs,
       const py::list& tables, const py::array& angles, bool propagated, const std::optional<std::string>& level)
      : twin(level_of(level)) {
    const predict::Model& model = *coder.model;
    const std::size_t parts = model.parts().size(), number = tables.size();
    rows = rows_of(table, parts);
    if (angles.ndim() != 3 || angles.shape(1) != 2) throw std::invalid_argument("angles: expected [angles, 2, half]");
    const auto turns = static_cast<std::size_t>(angles.shape(0)), half = static_cast<std::size_t>(angles.shape(2));
    const auto* const given = needed<std::int16_t>(angles, "angles", {turns, 2, half});
    for (std::size_t i = 0; i < turns * 2 * half; ++i)
      if (given[i] < -(1 << 14) || given[i] > 1 << 14) throw std::invalid_argument("angles: expected -16384..16384");
    const std::int64_t* const runs_data = needed<std::int64_t>(runs, "spans", {number, 3});
    std::size_t end = 0, all = 0;
    for (std::size_t i = 0; i < number; ++i) {
      donors.push_back(rows_of(py::cast<py::array>(tables[i]), parts));
      const std::int64_t first = runs_data[3 * i], length = runs_data[3 * i + 1], turn = runs_data[3 * i + 2];
      const bool fits = first >= static_cast<std::int64_t>(end) && length >= 1 &&
                        length <= static_cast<std::int64_t>(count) &&
                        first <= static_cast<std::int64_t>(count) - length;
      if (!fits) throw std::invalid_argument("spans: expected disjoint rising runs of the block's rows");
      if (turn >= static_cast<std::int64_t>(turns)) throw std::invalid_argument("spans: angles that there are not");
      if (turn >= 0)
        for (std::size_t p = 0; p < parts; p += 2)
          if (model.parts()[p].dim != 2 * half)
            throw std::invalid_argument("angles: expected half of every key's size");
      end = static_cast<std::size_t>(first + length);
      all += static_cast<std::size_t>(length);
      spans.push_back({static_cast<std::size_t>(first), static_cast<std::size_t>(length), turn, nullptr});
    }
    if (number == 0) throw std::invalid_argument("spans: expected at least one");
    for (std::size_t i = 0; i < number; ++i) spans[i].donor = donors[i].data();
    const auto last = static_cast<std::int64_t>(count);
    if (propagated && (!coder.propagates || start < 0 || last > model.positions() || start > model.positions() - last))
      throw std::invalid_argument("donor: the model has no weights, or does not know the positions");
    if (!codable(model, all)) throw std::invalid_argument("donor: a block has more values than can be coded at once");
    block = {spans.data(), number, given, half, rows.data(), start, propagated};
  }
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;
};

// The bytes of each layer; None where `out` is too short.
py::object encode(const Coder& coder, std::int64_t start, std::size_t count, const py::array& rows,
                  const py::array& spans, const py::list& donors, const py::array& angles, bool propagated,
                  const py::buffer& out, const std::optional<std::string>& level) {
  const Call call(coder, start, count, rows, spans, donors, angles, propagated, level);
  const py::buffer_info memory = contiguous(out, true);
  auto* const begin = static_cast<std::uint8_t*>(memory.ptr);
  const auto capacity = static_cast<std::size_t>(memory.size * memory.itemsize);
  std::vector<std::uint64_t> sizes(coder.model->parts().size() / 2);
  bool fits = false;
  {
    py::gil_scoped_release release;
    fits = donor::encode(*coder.model, call.block, begin, capacity, sizes.data(), call.twin);
  }
  if (!fits) return py::none();
  return py::tuple(py::cast(sizes));
}

// What is damaged, or None.
std::optional<std::string> decode(const Coder& coder, std::int64_t start, std::size_t count, const py::array& rows,
                                  const py::array& spans, const py::list& donors, const py::array& angles,
                                  bool propagated, const py::buffer& payload, const std::vector<std::uint64_t>& sizes,
                                  std::size_t wanted, const std::optional<std::string>& level) {
  const Call call(coder, start, count, rows, spans, donors, angles, propagated, level);
  if (sizes.size() * 2 != coder.model->parts().size()) throw std::invalid_argument("sizes: expected one a layer");
  const py::buffer_info memory = contiguous(payload, false);
  const auto* const begin = static_cast<const std::uint8_t*>(memory.ptr);
  const auto nbytes = static_cast<std::size_t>(memory.size * memory.itemsize);
  const char* wrong = nullptr;
  {
    py::gil_scoped_release release;
    wrong = donor::decode(*coder.model, call.block, begin, nbytes, sizes.data(), wanted, call.twin);
  }
  return wrong ? std::optional<std::string>(wrong) : std::nullopt;
}

}  // namespace

PYBIND11_MODULE(_donor, m) {
  m.doc() = "The donor codec's exact core; see csrc/donor/donor.h.";
  py::class_<Coder, std::shared_ptr<Coder>>(m, "Coder")
      .def(py::init(&build), py::kw_only(), py::arg("shapes"), py::arg("freqs"), py::arg("in_scale") = py::none(),
           py::arg("out_scale") = py::none(), py::arg("fix") = py::none(), py::arg("weight") = py::none(),
           py::arg("rope_fine") = py::none(), py::arg("rope_coarse") = py::none())
      .def_property_readonly("positions", [](const Coder& coder) { return coder.model->positions(); });
  m.def("encode", &encode, py::arg("coder"), py::arg("start"), py::arg("count"), py::arg("rows"), py::arg("spans"),
        py::arg("donors"), py::arg("angles"), py::arg("propagated"), py::arg("out"), py::arg("level") = py::none());
  m.def("decode", &decode, py::arg("coder"), py::arg("start"), py::arg("count"), py::arg("rows"), py::arg("spans"),
        py::arg("donors"), py::arg("angles"), py::arg("propagated"), py::arg("payload"), py::arg("sizes"),
        py::arg("wanted"), py::arg("level") = py::none());
}
