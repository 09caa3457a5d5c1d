#include "stitch/transport/tensorpipe/tensorpipe_endpoint_state.h"

#include <tensorpipe/tensorpipe.h>

#include <string_view>
#include <utility>

#include "stitch/base/signals.h"
#include "stitch/transport/ip_address.h"
#include "stitch/transport/tensorpipe/inside_call.h"
#include "stitch/transport/tensorpipe/tensorpipe_connection.h"
#include "stitch/transport/tensorpipe/tensorpipe_selection.h"

namespace stitch::transport {

namespace {

constexpr std::string_view kUvScheme = "uv://";

[[nodiscard]] std::shared_ptr<tp::transport::Context> make_transport(const std::string& name) {
  return name == "tensorpipe-shm" ? tp::transport::shm::create() : tp::transport::uv::create();
}
[[nodiscard]] std::shared_ptr<tp::channel::Context> make_channel(const std::string& name) {
  return name == "cma" ? tp::channel::cma::create() : tp::channel::basic::create();
}
[[nodiscard]] std::string listen_url(const std::string& transport,
                                     const std::string& bind_address) {
  if (transport == "tensorpipe-shm") return "tensorpipe-shm://";
  return bind_address.find(':') == std::string::npos ? "uv://" + bind_address
                                                     : "uv://[" + bind_address + "]";
}

}  // namespace

TensorPipeEndpointState::TensorPipeEndpointState(EndpointOptions options,
                                                 TensorPipeOptions tensorpipe)
    : options(std::move(options)), tensorpipe_(std::move(tensorpipe)) {
  const base::SignalsBlocked blocked(SIGPIPE);  // TensorPipe's threads start here and inherit it
  auto context = std::make_shared<tp::Context>();
  // The highest number is preferred. A transport that is not viable is left out, and listen() then
  // fails for it.
  int priority = 0;
  for (const auto& transport : tensorpipe_.transports)
    context->registerTransport(--priority, transport, make_transport(transport));
  priority = 0;
  for (const auto& channel : tensorpipe_.channels)
    context->registerChannel(--priority, channel, make_channel(channel));
  base::MutexLock lock(mutex_);
  context_ = std::move(context);
}

std::shared_ptr<TensorPipeEndpointState> TensorPipeEndpointState::make(
    EndpointOptions options, TensorPipeOptions tensorpipe) {
  auto endpoint =
      std::make_shared<TensorPipeEndpointState>(std::move(options), std::move(tensorpipe));
  base::MutexLock lock(endpoint->mutex_);
  endpoint->busy_ = std::shared_ptr<void>(nullptr, [endpoint](void*) {
    base::MutexLock deleter_lock(endpoint->mutex_);
    endpoint->idle_ = true;
    endpoint->idle_changed_.notify_all();
  });
  return endpoint;
}

std::shared_ptr<tp::Listener> TensorPipeEndpointState::open_listener(
    const std::vector<std::string>& urls) {
  std::shared_ptr<tp::Context> context;
  {
    base::MutexLock lock(mutex_);
    if (connections_.closed()) throw closed_error();
    context = context_;
  }
  for (const auto& url : urls) {
    if (!url.starts_with(kUvScheme)) continue;
    auto ip = IpAddress::parse_with_port(std::string_view(url).substr(kUvScheme.size()));
    if (!ip) ip = IpAddress::parse(tensorpipe_.bind_address, 0);
    if (ip) ip->check_bindable(url);
  }
  try {
    InsideCall call;
    return context->listen(urls);
  } catch (const std::exception& error) {
    throw Error(ErrorCode::disconnected,
                "address " + urls.front() + " could not be bound: " + error.what());
  }
}

std::vector<std::string> TensorPipeEndpointState::listen(Endpoint::Accept accept) {
  bool bound = false;
  {
    base::MutexLock lock(mutex_);
    if (accept_ != nullptr) throw Error(ErrorCode::invalid_argument, "endpoint listens already");
    bound = listener_ != nullptr;
  }
  if (!bound) static_cast<void>(bind());
  std::shared_ptr<tp::Listener> listener;
  std::vector<std::string> addresses;
  {
    base::MutexLock lock(mutex_);
    if (connections_.closed()) throw closed_error();
    accept_ = std::make_shared<const Endpoint::Accept>(std::move(accept));
    listener = listener_;
    addresses = addresses_;
  }
  accept_next(listener);
  return addresses;
}

std::vector<std::string> TensorPipeEndpointState::bind() {
  std::vector<std::string> urls;
  for (const auto& transport : tensorpipe_.transports)
    urls.push_back(listen_url(transport, tensorpipe_.bind_address));
  std::shared_ptr<tp::Listener> listener = open_listener(urls);
  std::vector<std::string> addresses;
  for (const auto& transport : tensorpipe_.transports)
    addresses.push_back(listener->url(transport));
  {
    base::MutexLock lock(mutex_);
    if (connections_.closed()) throw closed_error();
    listener_ = listener;
    addresses_ = addresses;
  }
  return addresses;
}

void TensorPipeEndpointState::accept_next(const std::shared_ptr<tp::Listener>& listener) {
  InsideCall call;
  listener->accept([self = shared_from_this(), busy = busy(), listener](
                       const tp::Error& error, std::shared_ptr<tp::Pipe> pipe) {
    // Always on the task thread, where Accept is called; accepting is rare.
    if (error) {
      self->thread->post([self] { self->reopen_listener(0); });
    } else {
      self->thread->post(
          [self, listener, busy, pipe = std::move(pipe)] { self->accepted(listener, pipe); });
    }
  });
}

void TensorPipeEndpointState::accepted(const std::shared_ptr<tp::Listener>& listener,
                                       std::shared_ptr<tp::Pipe> pipe) {
  std::shared_ptr<const Endpoint::Accept> accept;
  std::string name;
  {
    base::MutexLock lock(mutex_);
    if (connections_.closed()) return;
    accept = accept_;
    name = addresses_.front() + "#" + std::to_string(++accepted_count_);
  }
  auto connection = std::make_shared<TensorPipeConnection>(shared_from_this(), std::move(name),
                                                           std::nullopt, (*accept)());
  if (connections_.add(connection)) {
    connection->begin(std::move(pipe));
  } else {
    connection->fail(closed_error());
  }
  accept_next(listener);
}

void TensorPipeEndpointState::reopen_listener(int attempt) {
  // The system may take a moment to free the port. Where another process has taken it, the retries
  // go on at a slower pace: giving up would keep all later peers out with no error anywhere.
  constexpr int kQuickAttempts = 200;
  constexpr std::chrono::milliseconds kQuickRetry{50};
  constexpr std::chrono::milliseconds kSlowRetry{1000};
  std::vector<std::string> addresses;
  std::shared_ptr<tp::Listener> broken;
  std::shared_ptr<void> busy;  // keeps the context alive
  {
    base::MutexLock lock(mutex_);
    if (connections_.closed()) return;
    busy = busy_;
    broken.swap(listener_);
    addresses = addresses_;
  }
  {
    InsideCall call;
    broken.reset();
  }
  try {
    const std::shared_ptr<tp::Listener> listener = open_listener(addresses);
    {
      base::MutexLock lock(mutex_);
      if (connections_.closed()) return;
      listener_ = listener;
    }
    accept_next(listener);
  } catch (const Error&) {
    listener_failures_.fetch_add(1);
    const bool quick = attempt < kQuickAttempts;
    thread->post_at(std::chrono::steady_clock::now() + (quick ? kQuickRetry : kSlowRetry),
                    [weak = weak_from_this(), next = quick ? attempt + 1 : attempt] {
                      if (const auto self = weak.lock()) self->reopen_listener(next);
                    });
  }
}

std::shared_ptr<Connection> TensorPipeEndpointState::connect(const std::string& address,
                                                             Wanted whom, ConnectionEvents events) {
  auto connection =
      std::make_shared<TensorPipeConnection>(shared_from_this(), address, whom, std::move(events));
  if (!connections_.add(connection)) {
    thread->post([connection] { connection->fail(closed_error()); });
    return connection;
  }
  std::string problem = problem_with_address(address, tensorpipe_.transports);
  std::shared_ptr<tp::Pipe> pipe;
  if (problem.empty()) {
    std::shared_ptr<tp::Context> context;
    {
      base::MutexLock lock(mutex_);
      context = context_;  // valid until the last connection has ended
    }
    try {
      InsideCall call;
      pipe = context->connect(address);
      context.reset();
    } catch (const std::exception& error) {
      problem = error.what();
    }
  }
  if (pipe == nullptr) {
    thread->post([connection, problem = std::move(problem)] {
      connection->fail(Error(ErrorCode::disconnected,
                             "connect to \"" + connection->describe() + "\" failed: " + problem));
    });
  } else {
    connection->begin(std::move(pipe));
  }
  return connection;
}

void TensorPipeEndpointState::close() {
  const Error closed = closed_error();
  const auto open = connections_.close();
  if (!open) return;
  std::shared_ptr<tp::Listener> listener;
  {
    // A thread that opens a listener stores it under this lock, unless the endpoint is closed.
    base::MutexLock lock(mutex_);
    listener.swap(listener_);
  }
  for (const auto& connection : *open) connection->close(closed);
  if (listener != nullptr) {
    InsideCall call;
    listener->close();
    listener.reset();
  }
}

void TensorPipeEndpointState::join() {
  close();
  connections_.wait_until_empty();
  std::shared_ptr<void> busy;
  std::shared_ptr<tp::Context> context;
  {
    base::MutexLock lock(mutex_);
    busy.swap(busy_);
    lock.unlock();
    busy.reset();
    lock.lock();
    while (!idle_) idle_changed_.wait(mutex_);
    context.swap(context_);
  }
  if (context != nullptr) {
    InsideCall call;
    context->join();
    context.reset();
  }
  thread->join();
  std::shared_ptr<const Endpoint::Accept> accept;
  base::MutexLock lock(mutex_);
  accept.swap(accept_);
}

}  // namespace stitch::transport
