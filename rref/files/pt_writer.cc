#include <c10/util/strides.h>

#include <cstdint>
#include <string>
#include <utility>

#include "stitch/rref/files/file_tensors.h"
#include "stitch/rref/files/pickle.h"
#include "stitch/rref/files/zip_file.h"

namespace stitch::files {

namespace {

class Pickler {
 public:
  void op(unsigned char op) { out_.push_back(static_cast<char>(op)); }
  template <class T>
  void raw(T value) {
    out_.append(reinterpret_cast<const char*>(&value), sizeof value);
  }
  void text(std::string_view text) {
    op(kText);
    raw(static_cast<std::uint32_t>(text.size()));
    out_ += text;
  }
  void number(std::int64_t value) {
    if (std::in_range<std::int32_t>(value)) {
      op(kInt4);
      raw(static_cast<std::int32_t>(value));
    } else {
      op(kLong);
      raw(std::uint8_t{8});
      raw(value);
    }
  }
  void numbers(at::IntArrayRef list) {
    op(kMark);
    for (const std::int64_t each : list) number(each);
    op(kTuple);
  }
  void global(std::string_view name) {
    op(kGlobal);
    out_ += name;
    out_ += '\n';
  }
  void tensor(const at::Tensor& tensor, const std::string& key) {
    const ElementType& type = element_type(tensor.scalar_type());
    const bool newer = type.python != nullptr;
    global(newer ? kRebuildNewerTensor : kRebuildTensor);
    op(kMark);
    op(kMark);
    text("storage");
    global(newer ? std::string(kUntypedStorage)
                 : std::string(kTorch) + type.torch + std::string(kStorage));
    text(key);
    text("cpu");
    number(newer ? static_cast<std::int64_t>(tensor.nbytes()) : tensor.numel());
    op(kTuple);
    op(kPersistent);
    number(0);
    numbers(tensor.sizes());
    numbers(c10::contiguous_strides(tensor.sizes()));
    op(kFalse);
    global(kOrderedDict);
    op(kEmptyTuple);
    op(kReduce);
    if (newer) global(std::string(kTorch) + type.python);
    op(kTuple);
    op(kReduce);
  }
  [[nodiscard]] const std::string& out() const { return out_; }

 private:
  std::string out_;
};

}  // namespace

void write_pt(const Tensors& tensors, const Sink& out) {
  Pickler pickler;
  pickler.op(kProtocol);
  pickler.raw(std::uint8_t{2});
  pickler.op(kEmptyDict);
  pickler.op(kMark);
  std::size_t key = 0;
  for (const auto& [name, tensor] : tensors) {
    pickler.text(name);
    pickler.tensor(tensor, std::to_string(key++));
  }
  pickler.op(kSetItems);
  pickler.op(kStop);
  ZipWriter zip(out);
  const auto add = [&](const std::string& part, const void* data, std::size_t size) {
    zip.add("archive/" + part, data, size);
  };
  add("data.pkl", pickler.out().data(), pickler.out().size());
  add("byteorder", "little", 6);
  key = 0;
  for (const auto& [name, tensor] : tensors) {
    const at::Tensor values = plain(tensor);
    add("data/" + std::to_string(key++), values.data_ptr(), values.nbytes());
  }
  add("version", "3\n", 2);
  zip.finish();
}

}  // namespace stitch::files
