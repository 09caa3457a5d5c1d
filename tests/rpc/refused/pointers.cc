#include <span>
#include <string_view>

#include "stitch/rpc/worker.h"

namespace {

int take_pointer(int* number) { return *number; }
int take_text(int, const char* text) { return *text; }
int take_view(std::string_view text) { return text.empty(); }
int take_span(std::span<int> numbers) { return numbers[0]; }
int take_shared(std::shared_ptr<int> number) { return *number; }
int take_weak(std::weak_ptr<int> number) { return number.expired(); }
int take_function(int (*function)()) { return function(); }
int take_functional(std::function<int()> function) { return function(); }
int take_future(stitch::Future<int> future) { return future.get(); }
int take_out(int& number) { return number; }
int* give_pointer() { return nullptr; }

// Its serialize() looks like any other.
struct Shares {
  std::shared_ptr<int> number;
  template <class Archive>
  void serialize(Archive& archive) {
    archive(number);
  }
};
int take_sharing(Shares) { return 0; }

}  // namespace

void all() {
  int number = 0;
  // error: a pointer cannot be sent: send the value @ int ?\*, .*Argument<1, .*take_pointer>
  stitch::rpc_sync<take_pointer>("worker1", &number);
  // error: a const char\* cannot be sent: send a std::string @ Argument<2, .*take_text>
  stitch::rpc_async<take_text>("worker1", 1, "text").get();
  // error: a std::string_view cannot be sent: send a std::string @ Argument<1, .*take_view>
  stitch::rpc_sync<take_view>("worker1", "text");
  // error: a view of an array cannot be sent: send a std::vector @ Argument<1, .*take_span>
  stitch::rpc_sync<take_span>("worker1", std::span(&number, 1));
  // error: a shared pointer cannot be sent: .* a stitch::RRef @ Argument<1, .*take_shared>
  stitch::rpc_sync<take_shared>("worker1", std::make_shared<int>());
  // error: a shared pointer cannot be sent @ Argument<1, .*take_weak>
  stitch::rpc_sync<take_weak>("worker1", std::weak_ptr<int>());
  // error: a pointer to a function cannot be sent @ Argument<1, .*take_function>
  stitch::rpc_sync<take_function>("worker1", nullptr);
  // error: a std::function cannot be sent @ Argument<1, .*take_functional>
  stitch::rpc_sync<take_functional>("worker1", nullptr);
  // error: a stitch::Future cannot be sent: wait for it @ Argument<1, .*take_future>
  stitch::rpc_sync<take_future>("worker1", stitch::make_ready(1));
  // error: cannot take a non-const reference: changes @ int ?&, .*Argument<1, .*take_out>
  stitch::rpc_sync<take_out>("worker1", number);
  // error: a pointer cannot be sent @ <int ?\*, .*Result<.*give_pointer>
  stitch::rpc_sync<give_pointer>("worker1");
  // error: a std::shared_ptr or std::weak_ptr cannot be sent, also not in @ <int>
  stitch::rpc_sync<take_sharing>("worker1", Shares{});
}
