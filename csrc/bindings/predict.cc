// Python bindings of the predictive codec. Arrays of a model must have the exact dtype and shape, otherwise a
// ValueError names the one that has not; they are copied. Coding releases the GIL.
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bindings/in_order.h"
#include "bindings/model.h"
#include "predictive/float8/float8.h"
#include "predictive/predictive.h"
#include "predictive/wide.h"

namespace py = pybind11;
using namespace kvstore;
using namespace kvstore::bindings;

namespace {

const ArrayChecks kChecks("predictive");

std::shared_ptr<predict::Model> build(const py::array& shapes, const Lists& in_scale, const Lists& out_scale,
                                      const Lists& scale, const Lists& bias, const Lists& adapt, const Lists& fix,
                                      const Lists& weight, const py::array& token_kv, const MaybeArray& freqs,
                                      const MaybeArray& rope_fine, const MaybeArray& rope_coarse) {
  predict::Arrays arrays;
  arrays.layers = layers_of(kChecks, shapes);
  const ModelLists lists{&in_scale, &out_scale, &scale, &bias, &adapt, &fix, &weight};
  take_rope(kChecks, arrays, take_parts(kChecks, arrays, lists), rope_fine, rope_coarse);
  take_tokens(kChecks, arrays, token_kv);
  arrays.freqs = kChecks.maybe<std::uint16_t>(freqs, "freqs", {2 * predict::kClasses, predict::kSymbols});
  return std::make_shared<predict::Model>(arrays);
}

// The arguments that all functions below share, checked.
struct Call {
  Longs tokens;
  std::vector<Rows> rows;
  predict::Block block;
  Level twin;

  Call(const predict::Model& model, const py::array& ids, std::int64_t start, const py::array& table, bool coding,
       const MaybeLevel& level)
      : twin(level_of(level)) {
    tokens = tokens_of(ids);
    rows = rows_of(table, model.parts().size());
    block = {tokens.data(), static_cast<std::size_t>(tokens.size()), start, rows.data()};
    if (!predict::codable(model, block.count))
      kChecks.refuse("a block has more values than can be coded at once");
    if (coding && !model.codes()) kChecks.refuse("the model has no frequencies");
  }
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;
};

// What codes blocks of a dtype.
struct Coder {
  std::optional<predict::Wide> wide;
  std::optional<predict::Float8> float8;

  explicit Coder(const std::string& dtype) {
    if (dtype == "float32") {
      wide = predict::Wide::float32;
    } else if (dtype == "float16") {
      wide = predict::Wide::float16;
    } else if (dtype == "float8_e5m2") {
      float8 = predict::Float8::e5m2;
    } else if (dtype == "float8_e4m3fn") {
      float8 = predict::Float8::e4m3;
    } else if (dtype != "bfloat16") {
      kChecks.refuse("dtype: expected bfloat16, float32, float16, float8_e5m2 or float8_e4m3fn, found '" + dtype + "'");
    }
  }

  int encode(const predict::Model& model, const predict::Block& block, const Memory& out, std::size_t limit,
             std::uint64_t* sizes, Level level) const {
    if (wide) return predict::encode_wide(model, block, *wide, out.data(), out.size(), limit, sizes, level);
    if (float8) return predict::encode_float8(model, block, *float8, out.data(), out.size(), limit, sizes, level);
    return predict::encode(model, block, out.data(), out.size(), limit, sizes, level);
  }

  const char* decode(const predict::Model& model, const predict::Block& block, const Memory& payload,
                     const std::uint64_t* sizes, std::size_t wanted, Level level) const {
    const std::uint8_t* const from = payload.data();
    if (wide) return predict::decode_wide(model, block, *wide, from, payload.size(), sizes, wanted, level);
    if (float8) return predict::decode_float8(model, block, *float8, from, payload.size(), sizes, wanted, level);
    return predict::decode(model, block, from, payload.size(), sizes, wanted, level);
  }
};

// The bytes of each layer; None if `out` is too short; FALL_BACK.
py::object encode(const predict::Model& model, const py::array& tokens, std::int64_t start, const py::array& rows,
                  const py::buffer& out, const std::optional<std::size_t>& limit, const MaybeLevel& level,
                  const std::string& dtype) {
  const Coder coder(dtype);
  const Call call(model, tokens, start, rows, true, level);
  const Memory memory(out, true);
  std::vector<std::uint64_t> sizes(model.parts().size() / 2);
  const int result = unlocked(
      [&] { return coder.encode(model, call.block, memory, limit.value_or(SIZE_MAX), sizes.data(), call.twin); });
  if (result == predict::kFallBack) return py::int_(static_cast<int>(predict::kFallBack));
  return sizes_if(result == 0, sizes);
}

// What is damaged, or None.
std::optional<std::string> decode(const predict::Model& model, const py::array& tokens, std::int64_t start,
                                  std::size_t count, const py::buffer& payload,
                                  const std::vector<std::uint64_t>& sizes, const py::array& rows, std::size_t wanted,
                                  const MaybeLevel& level, const std::string& dtype) {
  const Coder coder(dtype);
  const Call call(model, tokens, start, rows, true, level);
  if (call.block.count != count) throw py::value_error("tokens: expected as many as the block has");
  check_layers(sizes, model.parts().size() / 2);
  if (wanted > count) throw py::value_error("wanted: more tokens than there are");
  const Memory memory(payload, false);
  return damage("predictive", unlocked([&] {
    return coder.decode(model, call.block, memory, sizes.data(), wanted, call.twin);
  }));
}

// Of bf16 alone.
std::unique_ptr<HeldInOrder> in_order(const std::shared_ptr<predict::Model>& model, const py::array& tokens,
                                      std::int64_t start, const py::buffer& payload,
                                      const std::vector<std::uint64_t>& sizes, const py::array& rows,
                                      std::size_t wanted, const MaybeLevel& level) {
  const auto call = std::make_shared<const Call>(*model, tokens, start, rows, true, level);
  if (wanted > call->block.count) throw py::value_error("wanted: more tokens than there are");
  const auto begin = [&](const Call& of, const std::uint8_t* data, std::size_t nbytes, const std::uint64_t* layers) {
    return predict::in_order(*model, of.block, data, nbytes, layers, wanted, of.twin);
  };
  return held<predict::Model, Call>("predictive", model->parts().size() / 2, model, call, payload, sizes, begin);
}

// Per part (symbols, classes, offsets); None if the block cannot be predicted.
py::object residuals(const predict::Model& model, const py::array& tokens, std::int64_t start, const py::array& rows,
                     const MaybeLevel& level) {
  const Call call(model, tokens, start, rows, false, level);
  std::vector<std::uint8_t*> symbols, classes;
  std::vector<std::int32_t*> offsets;
  py::list made;
  for (const predict::Part& part : model.parts()) {
    const std::vector<py::ssize_t> shape = {static_cast<py::ssize_t>(call.block.count),
                                            static_cast<py::ssize_t>(part.width)};
    py::array_t<std::uint8_t> s(shape), c(shape);
    py::array_t<std::int32_t> o(shape[0]);
    symbols.push_back(s.mutable_data());
    classes.push_back(c.mutable_data());
    offsets.push_back(o.mutable_data());
    made.append(py::make_tuple(s, c, o));
  }
  const bool good = unlocked([&] {
    return predict::residuals(model, call.block, symbols.data(), classes.data(), offsets.data(), call.twin);
  });
  if (!good) return py::none();
  return py::object(std::move(made));
}

}  // namespace

PYBIND11_MODULE(_predict, m) {
  m.doc() = "The predictive codec, lossless; see csrc/predictive/predictive.h.";
  py::class_<predict::Model, std::shared_ptr<predict::Model>>(m, "Model")
      .def(py::init(&build), py::kw_only(), py::arg("shapes"), py::arg("in_scale"), py::arg("out_scale"),
           py::arg("scale"), py::arg("bias"), py::arg("adapt"), py::arg("fix"), py::arg("weight"),
           py::arg("token_kv"), py::arg("freqs") = py::none(), py::arg("rope_fine") = py::none(),
           py::arg("rope_coarse") = py::none())
      .def_property_readonly("positions", &predict::Model::positions);
  m.def("encode", &encode, py::arg("model"), py::arg("tokens"), py::arg("start"), py::arg("rows"), py::arg("out"),
        py::arg("limit") = py::none(), py::arg("level") = py::none(), py::arg("dtype") = "bfloat16");
  m.def("decode", &decode, py::arg("model"), py::arg("tokens"), py::arg("start"), py::arg("count"),
        py::arg("payload"), py::arg("sizes"), py::arg("rows"), py::arg("wanted"), py::arg("level") = py::none(),
        py::arg("dtype") = "bfloat16");
  add_in_order(m);
  m.def("in_order", &in_order, py::arg("model"), py::arg("tokens"), py::arg("start"), py::arg("payload"),
        py::arg("sizes"), py::arg("rows"), py::arg("wanted"), py::arg("level") = py::none());
  m.def("residuals", &residuals, py::arg("model"), py::arg("tokens"), py::arg("start"), py::arg("rows"),
        py::arg("level") = py::none());
  m.attr("FALL_BACK") = static_cast<int>(predict::kFallBack);
}
