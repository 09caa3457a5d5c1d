#include "stitch/rref/owner_part.h"

#include <ATen/ATen.h>

#include <cstring>
#include <map>
#include <unordered_set>

#include "stitch/base/error.h"
#include "stitch/rref/files/file_tensors.h"
#include "stitch/rref/parameter_lock.h"

namespace stitch::rref {

namespace {

std::string dtype_of(const std::string& name, const at::Tensor& tensor) {
  const char* const torch = c10::toString(tensor.scalar_type());
  const auto* const type = files::find_type(&files::ElementType::torch, torch);
  if (type == nullptr || type->safetensors == nullptr || tensor.layout() != at::kStrided)
    files::refuse(files::tensor_text(name) + " cannot be in a checkpoint: it is " +
                  tensor.toString() + "; possible are dense tensors of the types of safetensors");
  return type->safetensors;
}

class StoredTensors final : public StoredObject {
 public:
  explicit StoredTensors(const std::vector<std::pair<std::string, RRef<at::Tensor>>>& tensors) {
    std::unordered_set<const void*> seen;
    for (const auto& [name, reference] : tensors) {
      const at::Tensor& tensor = reference.local_value();
      if (!tensor.defined() || !seen.insert(tensor.unsafeGetTensorImpl()).second)
        files::refuse(files::tensor_text(name) + " is undefined, or given under two names");
      tensors_.emplace_back(name, tensor);
    }
  }
  std::vector<std::pair<std::string, at::Tensor>> parameters() const override { return tensors_; }
  Fields stored(std::size_t parameter) const override {
    return {{"", tensors_[parameter].second.detach()}};
  }
  void check(std::size_t parameter, const std::vector<StoredTensor>& tensors) const override {
    const auto& [name, tensor] = tensors_[parameter];
    if (tensors.size() != 1 || !tensors[0].field.empty() || tensors[0].sizes != tensor.sizes() ||
        tensors[0].dtype != dtype_of(name, tensor))
      files::refuse(files::tensor_text(name) + " is of another type or shape");
  }
  void exchange(std::size_t parameter, Fields& fields) override {
    const at::NoGradGuard no_grad;
    at::Tensor& tensor = tensors_[parameter].second;
    at::Tensor former = tensor.detach().clone();
    tensor.copy_(fields.at(""));
    fields.at("") = std::move(former);
  }

 private:
  std::vector<std::pair<std::string, at::Tensor>> tensors_;
};

}  // namespace

struct OwnerPart::State {
  explicit State(std::shared_ptr<StoredObject> stored)
      : object(std::move(stored)),
        parameters(object->parameters()),
        list([this] {
          std::vector<StoredParameter> all;
          for (std::size_t i = 0; i < parameters.size(); ++i) {
            const auto& [name, tensor] = parameters[i];
            auto& each = all.emplace_back(
                StoredParameter{name, dtype_of(name, tensor), tensor.sizes().vec(), {}});
            const auto lock = parameter_lock(tensor);
            base::MutexLock held(*lock);
            for (const auto& [field, value] : object->stored(i)) {
              each.tensors.push_back({field, {}, value.sizes().vec()});
              each.tensors.back().dtype = dtype_of(each.name_of(each.tensors.back()), value);
            }
          }
          return all;
        }()),
        stream(list) {}

  // All or none.
  void exchange() STITCH_REQUIRES(mutex) {
    std::size_t done = 0;
    try {
      for (; done < staged.size(); ++done) exchange(done);
      object->exchange_options(options);
    } catch (...) {
      while (done > 0) exchange(--done);
      throw;
    }
    taken = !taken;
  }
  void exchange(std::size_t parameter) STITCH_REQUIRES(mutex) {
    const auto lock = parameter_lock(parameters[parameter].second);
    base::MutexLock held(*lock);
    object->exchange(parameter, staged[parameter]);
  }

  const std::shared_ptr<StoredObject> object;
  const std::vector<std::pair<std::string, at::Tensor>> parameters;
  const std::vector<StoredParameter> list;
  const TensorStream stream;

  base::Mutex mutex;  // before parameter locks
  std::vector<StoredParameter> prepared STITCH_GUARDED_BY(mutex);
  std::unique_ptr<const TensorStream> prepared_stream STITCH_GUARDED_BY(mutex);
  std::vector<StoredObject::Fields> staged STITCH_GUARDED_BY(mutex);
  CheckpointValues options STITCH_GUARDED_BY(mutex);
  // The pieces of prepared_stream that have not come: sizes by beginnings.
  std::map<std::uint64_t, std::uint64_t> missing STITCH_GUARDED_BY(mutex);
  bool taken STITCH_GUARDED_BY(mutex) = false;
};

OwnerPart::OwnerPart(std::shared_ptr<StoredObject> object)
    : state_(std::make_shared<State>(std::move(object))) {}

OwnerPart::OwnerPart(const std::vector<std::pair<std::string, RRef<at::Tensor>>>& tensors)
    : OwnerPart(std::make_shared<StoredTensors>(tensors)) {}

std::vector<StoredParameter> OwnerPart::list() const { return state_->list; }

at::Tensor OwnerPart::read(std::uint64_t begin, std::uint64_t bytes) const {
  const auto slices = state_->stream.slices({begin, bytes});
  at::Tensor piece = at::empty({static_cast<std::int64_t>(bytes)}, at::kByte);
  for (std::size_t k = 0; k < slices.size();) {
    const std::size_t i = slices[k].parameter;
    const StoredParameter& parameter = state_->list[i];
    const auto lock = parameter_lock(state_->parameters[i].second);
    base::MutexLock held(*lock);
    const auto fields = state_->object->stored(i);
    for (; k < slices.size() && slices[k].parameter == i; ++k) {
      const StoredTensor& listed = parameter.tensors[slices[k].tensor];
      const auto found = fields.find(listed.field);
      if (found == fields.end() || found->second.sizes() != listed.sizes ||
          dtype_of(parameter.name, found->second) != listed.dtype)
        files::refuse(files::tensor_text(parameter.name_of(listed)) +
                      " has changed its type or shape while it was saved");
      copy_slice(found->second, slices[k], piece.data_ptr<std::uint8_t>() + slices[k].at);
    }
  }
  return piece;
}

void OwnerPart::prepare(const std::vector<StoredParameter>& parameters,
                        const CheckpointValues& options) {
  auto stream = std::make_unique<const TensorStream>(parameters);
  if (parameters.size() != state_->list.size()) files::refuse("parameters are missing");
  std::vector<StoredObject::Fields> staged;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const StoredParameter& given = parameters[i];
    const StoredParameter& own = state_->list[i];
    if (given.name != own.name || given.dtype != own.dtype || given.sizes != own.sizes)
      files::refuse("parameter \"" + own.name + "\" is " + own.text() + ", given is \"" +
                    given.name + "\", " + given.text());
    state_->object->check(i, given.tensors);
    auto& fields = staged.emplace_back();
    for (const auto& tensor : given.tensors) {
      const auto* const type = files::find_type(&files::ElementType::safetensors, tensor.dtype);
      if (!fields.try_emplace(tensor.field, at::empty(tensor.sizes, type->type)).second)
        files::refuse(files::tensor_text(own.name_of(tensor)) + " is given twice");
    }
  }
  base::MutexLock lock(state_->mutex);
  if (state_->prepared_stream) files::refuse("tensors are being loaded already");
  state_->prepared = parameters;
  state_->missing.clear();
  for (const auto& piece : stream->pieces()) state_->missing.emplace(piece.begin, piece.bytes);
  state_->prepared_stream = std::move(stream);
  state_->staged = std::move(staged);
  state_->options = options;
}

void OwnerPart::write(std::uint64_t begin, const at::Tensor& bytes) {
  if (!is_piece(bytes)) files::refuse("a piece is plain bytes on the CPU");
  const auto size = static_cast<std::uint64_t>(bytes.nbytes());
  base::MutexLock lock(state_->mutex);
  if (!state_->prepared_stream || state_->taken) files::refuse("no tensors are being loaded");
  const auto piece = state_->missing.find(begin);
  if (piece == state_->missing.end() || piece->second != size)
    files::refuse("a piece is not expected, or has come already");
  for (const auto& slice : state_->prepared_stream->slices({begin, size})) {
    const auto& field = state_->prepared[slice.parameter].tensors[slice.tensor].field;
    const at::Tensor& to = state_->staged[slice.parameter].at(field);
    const auto* const from = static_cast<const std::byte*>(bytes.data_ptr()) + slice.at;
    if (to.scalar_type() == at::kBool) files::expect_bools({from, slice.bytes});
    std::memcpy(static_cast<std::byte*>(to.data_ptr()) + slice.from, from, slice.bytes);
  }
  state_->missing.erase(piece);
}

void OwnerPart::take() {
  base::MutexLock lock(state_->mutex);
  if (!state_->prepared_stream || state_->taken || !state_->missing.empty())
    files::refuse("tensors are not loaded completely, or taken already");
  state_->exchange();
}

void OwnerPart::take_back() {
  base::MutexLock lock(state_->mutex);
  if (state_->taken) state_->exchange();
  state_->prepared_stream.reset();
  state_->staged.clear();
}

bool is_piece(const at::Tensor& tensor) {
  return tensor.defined() && tensor.is_cpu() && tensor.layout() == at::kStrided &&
         tensor.is_contiguous();
}

void copy_slice(const at::Tensor& tensor, const TensorStream::Slice& slice, void* to) {
  const at::NoGradGuard no_grad;
  const std::uint64_t item = tensor.element_size();
  const std::uint64_t first = slice.from / item;
  const std::uint64_t last = (slice.from + slice.bytes + item - 1) / item;
  const at::Tensor part = files::plain(tensor.reshape(-1).narrow(
      0, static_cast<std::int64_t>(first), static_cast<std::int64_t>(last - first)));
  std::memcpy(to, static_cast<const std::byte*>(part.data_ptr()) + (slice.from - first * item),
              slice.bytes);
}

}  // namespace stitch::rref
