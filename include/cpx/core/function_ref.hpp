// SPDX-License-Identifier: Apache-2.0
// What a call of a function is given to call, behind one type: as std::function_ref of C++26.
#pragma once

#include <concepts>
#include <memory>
#include <type_traits>
#include <utility>

namespace cpx::detail {

template <class Signature>
class function_ref;

/// Refers to what can be called with `Args` and outlives this, and owns nothing: for parameters. Of a temporary, it is
/// good until the end of the statement. A type costs the compiler one function, a `std::function` five.
template <class R, class... Args>
class function_ref<R(Args...)> {
public:
    template <class F>
        requires(!std::same_as<std::remove_cvref_t<F>, function_ref> &&
                 !std::is_member_pointer_v<std::remove_cvref_t<F>> && std::is_invocable_r_v<R, F&, Args...>)
    function_ref(F&& f)
        : object_((void*)std::addressof(f)), // also of a const object or a function
          call_([](void* object, Args... args) -> R {
              auto& called = *reinterpret_cast<std::remove_reference_t<F>*>(object);
              if constexpr (std::is_void_v<R>)
                  static_cast<void>(called(std::forward<Args>(args)...));
              else
                  return called(std::forward<Args>(args)...);
          }) {}

    R operator()(Args... args) const { return call_(object_, std::forward<Args>(args)...); }

private:
    void* object_;
    R (*call_)(void*, Args...);
};

} // namespace cpx::detail
