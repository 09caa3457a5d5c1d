// Read before everything else by units that clang compiles with libtorch; other compilers do not
// see it.
//
// In C++20 libstdc++'s std::vector is constexpr, and clang instantiates constexpr members where
// they are first used. libtorch's headers use std::vector<c10::IValue> where c10::IValue is only
// declared, which is sound for members instantiated at the end of the unit and an error for clang.
// So clang gets a std::vector without constexpr: same layout, same symbols.
//
// One function stands in the way: bits/stl_algobase.h has declared __fill_a1 for bit iterators as
// constexpr already, and the definition in bits/stl_bvector.h may not say otherwise. It is defined
// under another name with the expected symbol.
#pragma once
#pragma GCC system_header

#include <algorithm>
#include <initializer_list>
#include <iterator>
#include <memory>
#include <string>

#if defined(__clang__) && defined(__GLIBCXX__) && __cplusplus >= 202002L && \
    !defined(_GLIBCXX_VECTOR)
namespace std {
__attribute__((used)) inline void __fill_bits(_Bit_iterator, _Bit_iterator, const bool&) __asm__(
    "_ZSt9__fill_a1St13_Bit_iteratorS_RKb");
}
#pragma push_macro("_GLIBCXX20_CONSTEXPR")
#undef _GLIBCXX20_CONSTEXPR
#define _GLIBCXX20_CONSTEXPR
#define __fill_a1 __fill_bits
#include <vector>
#undef __fill_a1
#pragma pop_macro("_GLIBCXX20_CONSTEXPR")
#endif
