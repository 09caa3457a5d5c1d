// Linked into every program of a sanitizer build: the options and suppressions that hold for all of
// them. The environment (ASAN_OPTIONS, TSAN_OPTIONS, ...) can still override each one.
//
// The sanitizers call these before they are ready themselves, so nothing here may be instrumented.
#if defined(__SANITIZE_THREAD__)
#define STITCH_THREAD_SANITIZER 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define STITCH_THREAD_SANITIZER 1
#endif
#endif

extern "C" {

#if defined(STITCH_THREAD_SANITIZER)

__attribute__((no_sanitize("thread"))) const char* __tsan_default_options() {
  return "halt_on_error=1:second_deadlock_stack=1:history_size=4:suppressions=" STITCH_SUPPRESSIONS
         "/tsan.supp";
}

#else

__attribute__((no_sanitize("address"), no_sanitize("undefined"))) const char*
__asan_default_options() {
  return "detect_stack_use_after_return=1:check_initialization_order=1:strict_init_order=1";
}

__attribute__((no_sanitize("address"), no_sanitize("undefined"))) const char*
__lsan_default_options() {
  return "print_suppressions=0:suppressions=" STITCH_SUPPRESSIONS "/lsan.supp";
}

__attribute__((no_sanitize("address"), no_sanitize("undefined"))) const char*
__ubsan_default_options() {
  return "print_stacktrace=1:halt_on_error=1";
}

#endif
}
