// Python bindings of the donor codec's mode in groups. Arrays of a model must have the exact dtype and shape, otherwise
// a ValueError names the one that has not; they are copied. Coding releases the GIL.
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bindings/in_order.h"
#include "bindings/level_model.h"
#include "bindings/spans.h"
#include "donor/groups.h"

namespace py = pybind11;
using namespace kvstore;
using namespace kvstore::bindings;

namespace {

const ArrayChecks kChecks("donor");

struct Coder {
  levels::Model model;
};

std::shared_ptr<Coder> build(int level, const py::array& shapes, const py::list& parts, const py::array& token_kv,
                             const py::array& freqs, const MaybeArray& rope_fine, const MaybeArray& rope_coarse) {
  return std::make_shared<Coder>(
      Coder{level_model(kChecks, level, shapes, parts, token_kv, freqs, rope_fine, rope_coarse)});
}

struct Call : SpansCall {
  Call(const Coder& coder, std::int64_t start, std::size_t count, const py::array& table, const py::array& runs,
       const py::list& tables, const py::array& angles, const MaybeLevel& level)
      : SpansCall(kChecks, coder.model.parts(), start, count, table, runs, tables, angles, true, level) {
    const std::int64_t last = static_cast<std::int64_t>(count), positions = coder.model.positions();
    if (start < 0 || last > positions || start > positions - last)
      kChecks.refuse("the model does not know the positions");
    if (!levels::codable(coder.model, donor::covered(block)))
      kChecks.refuse("a block has more values than can be coded at once");
  }
};

// The bytes of each layer; None if `out` is too short.
py::object encode(const Coder& coder, std::int64_t start, std::size_t count, const py::array& rows,
                  const py::array& spans, const py::list& donors, const py::array& angles, const py::buffer& out,
                  const MaybeLevel& level) {
  const Call call(coder, start, count, rows, spans, donors, angles, level);
  const Memory memory(out, true);
  std::vector<std::uint64_t> sizes(coder.model.parts().size() / 2);
  const bool fits = unlocked([&] {
    return donor::groups::encode(coder.model, call.block, memory.data(), memory.size(), sizes.data(), call.twin);
  });
  return sizes_if(fits, sizes);
}

// What is damaged, or None.
std::optional<std::string> decode(const Coder& coder, std::int64_t start, std::size_t count, const py::array& rows,
                                  const py::array& spans, const py::list& donors, const py::array& angles,
                                  const py::buffer& payload, const std::vector<std::uint64_t>& sizes,
                                  std::size_t wanted, const MaybeLevel& level) {
  const Call call(coder, start, count, rows, spans, donors, angles, level);
  check_layers(sizes, coder.model.parts().size() / 2);
  if (wanted > count) throw py::value_error("wanted: more tokens than there are");
  const Memory memory(payload, false);
  return damage("donor", unlocked([&] {
    return donor::groups::decode(coder.model, call.block, memory.data(), memory.size(), sizes.data(), wanted,
                                 call.twin);
  }));
}

std::unique_ptr<HeldInOrder> in_order(const std::shared_ptr<Coder>& coder, std::int64_t start, std::size_t count,
                                      const py::array& rows, const py::array& spans, const py::list& donors,
                                      const py::array& angles, const py::buffer& payload,
                                      const std::vector<std::uint64_t>& sizes, std::size_t wanted,
                                      const MaybeLevel& level) {
  const auto call = std::make_shared<const Call>(*coder, start, count, rows, spans, donors, angles, level);
  if (wanted > count) throw py::value_error("wanted: more tokens than there are");
  const auto begin = [&](const Call& of, const std::uint8_t* data, std::size_t nbytes, const std::uint64_t* layers) {
    return donor::groups::in_order(coder->model, of.block, data, nbytes, layers, wanted, of.twin);
  };
  return held<Coder, Call>("donor", coder->model.parts().size() / 2, coder, call, payload, sizes, begin);
}

}  // namespace

PYBIND11_MODULE(_donor_groups, m) {
  m.doc() = "The donor codec's mode in groups; see csrc/donor/groups.h.";
  py::class_<Coder, std::shared_ptr<Coder>>(m, "Coder")
      .def(py::init(&build), py::kw_only(), py::arg("level"), py::arg("shapes"), py::arg("parts"), py::arg("token_kv"),
           py::arg("freqs"), py::arg("rope_fine") = py::none(), py::arg("rope_coarse") = py::none())
      .def_property_readonly("positions", [](const Coder& coder) { return coder.model.positions(); });
  m.def("encode", &encode, py::arg("coder"), py::arg("start"), py::arg("count"), py::arg("rows"), py::arg("spans"),
        py::arg("donors"), py::arg("angles"), py::arg("out"), py::arg("level") = py::none());
  m.def("decode", &decode, py::arg("coder"), py::arg("start"), py::arg("count"), py::arg("rows"), py::arg("spans"),
        py::arg("donors"), py::arg("angles"), py::arg("payload"), py::arg("sizes"), py::arg("wanted"),
        py::arg("level") = py::none());
  add_in_order(m);
  m.def("in_order", &in_order, py::arg("coder"), py::arg("start"), py::arg("count"), py::arg("rows"), py::arg("spans"),
        py::arg("donors"), py::arg("angles"), py::arg("payload"), py::arg("sizes"), py::arg("wanted"),
        py::arg("level") = py::none());
}
