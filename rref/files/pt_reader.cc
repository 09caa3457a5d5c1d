// A pickle is a program for a machine with a stack. This one knows the instructions that make plain
// values, and no others. Names of classes and functions are compared with a list, never looked up.
#include <algorithm>
#include <cstring>
#include <deque>
#include <iterator>
#include <utility>
#include <variant>
#include <vector>

#include "stitch/base/printable.h"
#include "stitch/rref/files/file_tensors.h"
#include "stitch/rref/files/pickle.h"
#include "stitch/rref/files/zip_file.h"

namespace stitch::files {

namespace {

class Unpickler {
 public:
  Unpickler(const FileBytes& file, std::span<std::byte> pickle, std::string prefix,
            const std::map<std::string_view, std::span<std::byte>>& parts)
      : file_(file), pickle_(pickle), prefix_(std::move(prefix)), parts_(parts) {}

  Tensors read() {
    const Value value = run();
    const auto* const top = std::get_if<Container*>(&value);
    if (top == nullptr || (*top)->kind != Kind::dict) refuse("it has no dict of tensors");
    collect(value, "", 0);
    return std::move(tensors_);
  }

 private:
  struct Other {};  // a value that no tensor needs: None, a float, a bool
  struct Global {
    std::string_view name;
  };
  struct Storage {
    at::Storage memory;
    const ElementType* type = nullptr;  // null: each tensor says its own
    std::uint64_t bytes = 0;
  };
  struct Container;
  // Containers and storages belong to the unpickler: a pickle can make circles of them.
  using Value = std::variant<Other, std::int64_t, std::string_view, Global, const Storage*,
                             Container*, at::Tensor>;
  enum class Kind { tuple, list, dict };
  struct Container {
    Kind kind;
    std::vector<Value> items;  // of a dict, keys and values in turn
  };

  [[noreturn]] static void damaged(const std::string& why, std::string_view what = "") {
    refuse("its pickle is damaged: " + std::string(what) + why);
  }

  std::span<std::byte> next(std::uint64_t size) {
    const auto taken = take(pickle_, at_, size);
    at_ += size;
    return taken;
  }
  template <class T>
  T next() {
    T value{};
    std::memcpy(&value, next(sizeof value).data(), sizeof value);
    return value;
  }
  std::string_view next_text() { return text_of(next(next<std::uint32_t>())); }
  // Up to the second end of a line.
  std::string_view next_global() {
    const std::string_view rest = text_of(pickle_.subspan(at_));
    const std::size_t end = rest.find('\n', rest.find('\n') + 1);
    if (end == std::string_view::npos) damaged("a name has no end");
    at_ += end + 1;
    return rest.substr(0, end);
  }

  void push(Value value) { stack_.push_back(std::move(value)); }
  Value pop() {
    if (stack_.size() <= (marks_.empty() ? 0 : marks_.back())) damaged("a value is missing");
    Value value = std::move(stack_.back());
    stack_.pop_back();
    return value;
  }
  std::vector<Value> pop(std::size_t count) {
    std::vector<Value> values(count);
    while (count > 0) values[--count] = pop();
    return values;
  }
  std::vector<Value> pop_to_mark() {
    if (marks_.empty()) damaged("a mark is missing");
    std::vector<Value> values = pop(stack_.size() - marks_.back());
    marks_.pop_back();
    return values;
  }
  Container* make(Kind kind, std::vector<Value> items = {}) {
    return &containers_.emplace_back(Container{kind, std::move(items)});
  }
  // The T in a value. Throws when it has another type.
  template <class T>
  static const T& as(const Value& value, const char* what) {
    const T* const typed = std::get_if<T>(&value);
    if (typed == nullptr) damaged(" is missing, or of another type", what);
    return *typed;
  }
  static const std::vector<Value>& tuple(const Value& value, const char* what) {
    const Container& container = *as<Container*>(value, what);
    if (container.kind != Kind::tuple) damaged(std::string(what) + " is no tuple");
    return container.items;
  }
  void add(Kind kind, std::vector<Value> items) {
    const Value target = pop();
    Container& container = *as<Container*>(target, "a container");
    if (container.kind != kind || (kind == Kind::dict && items.size() % 2 != 0))
      damaged("a container has another type");
    std::move(items.begin(), items.end(), std::back_inserter(container.items));
    push(target);
  }

  Value run() {
    unsigned char op = 0;
    while ((op = next<unsigned char>()) != kStop) step(op);
    return pop();
  }
  void step(unsigned char op) {
    switch (op) {
      case kProtocol:
        return static_cast<void>(next(1));
      case kMark:
        return marks_.push_back(stack_.size());
      case kNone:
      case kTrue:
      case kFalse:
        return push(Other());
      case kFloat:
        return push((next(8), Other()));
      case kInt1:
        return push(std::int64_t{next<std::uint8_t>()});
      case kInt2:
        return push(std::int64_t{next<std::uint16_t>()});
      case kInt4:
        return push(std::int64_t{next<std::int32_t>()});
      case kLong:
        return push(next_long());
      case kText:
        return push(next_text());
      case kGlobal:
        return push(global(next_global()));
      case kEmptyDict:
        return push(make(Kind::dict));
      case kEmptyList:
        return push(make(Kind::list));
      case kEmptyTuple:
        return push(make(Kind::tuple));
      case kTuple1:
      case kTuple2:
      case kTuple3:
        return push(make(Kind::tuple, pop(op - kTuple1 + 1)));
      case kTuple:
        return push(make(Kind::tuple, pop_to_mark()));
      case kAppend:
        return add(Kind::list, pop(1));
      case kAppends:
        return add(Kind::list, pop_to_mark());
      case kSetItem:
        return add(Kind::dict, pop(2));
      case kSetItems:
        return add(Kind::dict, pop_to_mark());
      case kBuild:  // attributes, which the state dict of a module has
        return static_cast<void>(pop()), add(Kind::dict, {});
      case kPut1:
        return put(next<std::uint8_t>());
      case kPut4:
        return put(next<std::uint32_t>());
      case kGet1:
        return get(next<std::uint8_t>());
      case kGet4:
        return get(next<std::uint32_t>());
      case kPersistent:
        return push(storage(pop()));
      case kReduce:
        return reduce();
      default:
        refuse("its pickle has instruction " + std::to_string(op) +
               ", which torch.save does not write of plain values (with its pickle_protocol=2)");
    }
  }
  void put(std::uint32_t index) { push(memo_[index] = pop()); }
  void get(std::uint32_t index) {
    const auto found = memo_.find(index);
    if (found == memo_.end()) damaged("it uses what it has not kept");
    push(found->second);
  }
  Value next_long() {
    const auto bytes = next(next<std::uint8_t>());
    if (bytes.empty() || bytes.size() > 8) return Other();
    std::uint64_t value = 0;
    for (std::size_t i = bytes.size(); i-- > 0;)
      value = value << 8 | std::to_integer<std::uint64_t>(bytes[i]);
    const auto unused = 64 - 8 * bytes.size();
    return static_cast<std::int64_t>(value << unused) >> unused;
  }

  // The types of these names; null when they have none.
  static const ElementType* type_of_storage(std::string_view name) {
    if (!name.starts_with(kTorch) || !name.ends_with(kStorage)) return nullptr;
    name.remove_suffix(kStorage.size());
    return find_type(&ElementType::torch, name.substr(kTorch.size()));
  }
  static const ElementType* newer_type(std::string_view name) {
    if (!name.starts_with(kTorch)) return nullptr;
    return find_type(&ElementType::python, name.substr(kTorch.size()));
  }
  static Global global(std::string_view name) {
    const bool known = name == kOrderedDict || name == kRebuildTensor ||
                       name == kRebuildNewerTensor || name == kRebuildParameter ||
                       name == kUntypedStorage || type_of_storage(name) != nullptr ||
                       newer_type(name) != nullptr;
    if (known) return {name};
    std::string shown(name);
    std::replace(shown.begin(), shown.end(), '\n', '.');
    refuse("it has a value of " + base::printable(shown) +
           "; plain dicts, lists, tuples, numbers, strings and dense tensors can be read");
  }

  // ("storage", its type, its number, its device, its elements)
  const Storage* storage(const Value& id) {
    const auto& fields = tuple(id, "a storage");
    if (fields.size() != 5) damaged("a storage has not five fields");
    const auto name = as<Global>(fields[1], "the type of a storage").name;
    const auto key = as<std::string_view>(fields[2], "the number of a storage");
    const auto elements = as<std::int64_t>(fields[4], "the size of a storage");
    const ElementType* const type = type_of_storage(name);
    if (type == nullptr && name != kUntypedStorage) damaged("a storage has another type");
    if (key.size() > 32) damaged("the number of a storage is too long");
    const auto part = parts_.find(prefix_ + "data/" + std::string(key));
    if (part == parts_.end())
      refuse("it has no storage \"" + base::printable(std::string(key)) + '"');
    const auto bytes = part->second;
    const std::uint64_t item = type == nullptr ? 1 : c10::elementSize(type->type);
    if (elements < 0 || static_cast<std::uint64_t>(elements) > bytes.size() / item)
      refuse("storage \"" + base::printable(std::string(key)) + "\" has " +
             std::to_string(bytes.size()) + " bytes, " + std::to_string(elements) +
             " elements of " + std::to_string(item) + " are announced");
    Storage& known = storages_[part->first];
    if (!known.memory) {
      if (type != nullptr && type->type == at::kBool) expect_bools(bytes);
      known = {storage_of(file_, bytes, alignof(std::max_align_t)), type, bytes.size()};
    }
    if (known.type != type) damaged("a storage has two types");
    return &known;
  }

  void reduce() {
    const Value last = pop();
    const auto& arguments = tuple(last, "an argument");
    const Value function = pop();
    const auto name = as<Global>(function, "a function").name;
    const bool newer = name == kRebuildNewerTensor;
    if (name == kOrderedDict && arguments.empty()) return push(make(Kind::dict));
    if (name == kRebuildParameter && arguments.size() == 3)
      return push(as<at::Tensor>(arguments[0], "a parameter"));
    if ((name == kRebuildTensor && arguments.size() == 6) || (newer && arguments.size() == 7))
      return push(tensor(arguments, newer));
    refuse("it has a tensor with metadata, such as a conjugated one, or is damaged");
  }
  // (storage, offset, sizes, strides, requires_grad, hooks) and, of newer types, the type.
  at::Tensor tensor(const std::vector<Value>& arguments, bool newer) {
    const Storage& in = *as<const Storage*>(arguments[0], "a storage");
    const auto offset = as<std::int64_t>(arguments[1], "an offset");
    const auto sizes = numbers(arguments[2]);
    const auto strides = numbers(arguments[3]);
    const ElementType* const type =
        newer ? newer_type(as<Global>(arguments[6], "a type").name) : in.type;
    if (type == nullptr) damaged("a tensor has no type");
    if (sizes.size() != strides.size() || offset < 0) damaged("a tensor has no shape");
    const auto span = span_elements(sizes, strides);
    const std::uint64_t in_storage = in.bytes / c10::elementSize(type->type);
    if (!span || *span > in_storage || static_cast<std::uint64_t>(offset) > in_storage - *span)
      refuse("a tensor reaches beyond its storage of " + std::to_string(in.bytes) + " bytes");
    return view_of(in.memory, type->type, offset, sizes, strides);
  }
  static std::vector<std::int64_t> numbers(const Value& value) {
    std::vector<std::int64_t> list;
    for (const Value& each : tuple(value, "a shape")) {
      list.push_back(as<std::int64_t>(each, "a size"));
      if (list.back() < 0) damaged("a size is negative");
    }
    return list;
  }

  // Tensors in `value`, which is called `name`. A pickle can name one container very often, and
  // within itself: names are bounded by the bytes that there are for them.
  void collect(const Value& value, const std::string& name, int depth) {
    spent_ += 1 + name.size();
    if (depth > 64 || spent_ > 4 * pickle_.size() + 4096)
      refuse("its containers are within one another more often than tensors need");
    if (const auto* const tensor = std::get_if<at::Tensor>(&value)) {
      if (!tensors_.emplace(name, *tensor).second) refuse("it has " + tensor_text(name) + " twice");
    }
    const auto* const found = std::get_if<Container*>(&value);
    if (found == nullptr) return;
    const Container& container = **found;
    const std::string front = depth == 0 ? "" : name + '.';
    const std::size_t step = container.kind == Kind::dict ? 2 : 1;
    for (std::size_t i = 0; i < container.items.size(); i += step) {
      const Value key = step == 1 ? Value(static_cast<std::int64_t>(i)) : container.items[i];
      const auto* const number = std::get_if<std::int64_t>(&key);
      const std::string last = number != nullptr ? std::to_string(*number)
                                                 : std::string(as<std::string_view>(key, "a key"));
      collect(container.items[i + step - 1], front + last, depth + 1);
    }
  }

  const FileBytes& file_;
  const std::span<std::byte> pickle_;
  const std::string prefix_;
  const std::map<std::string_view, std::span<std::byte>>& parts_;
  std::uint64_t at_ = 0;
  std::vector<Value> stack_;
  std::vector<std::size_t> marks_;  // what the stack had
  std::map<std::uint32_t, Value> memo_;
  std::deque<Container> containers_;
  std::map<std::string_view, Storage> storages_;  // by their part
  Tensors tensors_;
  std::uint64_t spent_ = 0;
};

}  // namespace

Tensors read_pt(const FileBytes& file) {
  constexpr std::string_view kPickle = "/data.pkl";
  const auto parts = read_zip(file);
  const auto is_pickle = [&](const auto& part) {
    return part.first.ends_with(kPickle) &&
           part.first.find('/') == part.first.size() - kPickle.size();
  };
  const auto pickle = std::find_if(parts.begin(), parts.end(), is_pickle);
  if (pickle == parts.end())
    refuse("it has no part \"<name>/data.pkl\": torch.save has not written it");
  if (std::find_if(std::next(pickle), parts.end(), is_pickle) != parts.end())
    refuse("it has two parts \"<name>/data.pkl\"");
  const std::string prefix(pickle->first.substr(0, pickle->first.find('/') + 1));
  if (const auto order = parts.find(prefix + "byteorder");
      order != parts.end() && text_of(order->second) != "little")
    refuse("it was written on a big-endian machine");
  return Unpickler(file, pickle->second, prefix, parts).read();
}

}  // namespace stitch::files
