#include "stitch/rpc/worker.h"

namespace {

struct Pointer {
  int number = 0;
  int* where = nullptr;
};
struct Text {
  std::string text;
  int number = 0;
  const char* more = nullptr;
};
struct Reference {
  int number;
  int& other;
};
struct Constant {
  const int number = 0;
};
struct Deep {
  std::vector<std::map<int, std::optional<Pointer>>> inside;
};
struct Base {
  int number;
};
struct Derived : Base {
  int other;
};
struct Union {
  union {
    int number;
    float other;
  };
};
struct Seventeen {
  int a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p, q;
};
class Closed {
 public:
  int get() const { return number_; }

 private:
  int number_ = 0;
};
struct NoDefault {
  explicit NoDefault(int value) : number(value) {}
  int number;
  template <class Archive>
  void serialize(Archive& archive) {
    archive(number);
  }
};
struct Large {
  std::array<char, 2 << 20> bytes;
};

template <class T>
int take(T) {
  return 0;
}
Closed give() { return {}; }

}  // namespace

void all() {
  int number = 0;
  // error: stitch: a pointer cannot be sent @ <int ?\*, .*Field<2, .*Pointer>
  stitch::rpc_sync<take<Pointer>>("worker1", Pointer{});
  // error: a const char\* cannot be sent: send a std::string @ Field<3, .*Text>
  stitch::rpc_sync<take<Text>>("worker1", Text{});
  // error: a reference cannot be sent: make the field a value @ Field<2, .*Reference>
  stitch::rpc_sync<take<Reference>>("worker1", Reference{1, number});
  // error: a reference or a const field cannot be received @ Field<1, .*Constant>
  stitch::rpc_sync<take<Constant>>("worker1", Constant{});
  // error: struct with a base class cannot be sent as it is: .* serialize @ Derived, .*Argument<1,
  stitch::rpc_sync<take<Derived>>("worker1", Derived{});
  // error: a struct with a union, .*, cannot be sent as it is: .* serialize @ Union, .*Argument<1,
  stitch::rpc_sync<take<Union>>("worker1", Union{});
  // error: a struct of more than 16 fields cannot be sent as it is @ Seventeen, .*Argument<1,
  stitch::rpc_sync<take<Seventeen>>("worker1", Seventeen{});
  // error: this type cannot be sent: .* serialize.* stitch::RRef @ Closed, .*Argument<1,
  stitch::rpc_sync<take<Closed>>("worker1", Closed());
  // error: this type cannot be sent @ Closed, .*Result<.*give>
  stitch::rpc_sync<give>("worker1");
  // error: this type cannot be received: give it a default constructor @ NoDefault, .*Argument<1,
  stitch::rpc_sync<take<NoDefault>>("worker1", NoDefault(1));
  // error: a value of more than 64 KiB cannot be sent: send a std::vector @ Large, .*Argument<1,
  stitch::rpc_sync<take<Large>>("worker1", Large{});
}

// A place that was told once is not told again.
void deep() { stitch::rpc_sync<take<Deep>>("worker1", Deep{}); }
