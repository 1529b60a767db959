# kt_isa(name architecture source flags...) compiles one CPU variant into objects of its own and checks what they export.
#
# How a variant is built:
#   its architecture, or `any`   built with its flags
#   another architecture         not built
#   KT_EMULATE=ON                all are built; those that this machine cannot run are compiled with the flags that it can
#                                run (none without AVX2), against the headers in csrc/emulate, which implement the
#                                intrinsics in C++, so tests cover every variant
#   KT_NATIVE=ON                 of those that this machine runs: generic, the first with vectors of its own, which also
#                                has the float32 kernels, and the best; the others would never be chosen here
#
# The check: an object may export its table, kt::kernels_<name>, and nothing else. An inline function or a template
# compiled with -mavx512f that another file instantiates too is one symbol to the linker, which may keep the AVX-512
# copy for all callers, on every CPU.

set(KT_ISA_NAMES "")

string(TOLOWER "${CMAKE_SYSTEM_PROCESSOR}" kt_processor)
if(kt_processor MATCHES "^(x86_64|amd64)$")
  set(KT_ARCHITECTURE x86_64)
elseif(kt_processor MATCHES "^(aarch64|arm64)$")
  set(KT_ARCHITECTURE aarch64)
else()
  set(KT_ARCHITECTURE other)
endif()

set(kt_host_flags " ")
if(EXISTS /proc/cpuinfo AND NOT CMAKE_CROSSCOMPILING)
  file(STRINGS /proc/cpuinfo kt_cpuinfo REGEX "^(flags|Features)" LIMIT_COUNT 1)
  string(REGEX REPLACE "^[A-Za-z]+[^:]*:(.*)$" "\\1 " kt_host_flags "${kt_cpuinfo}")
endif()

# Does the machine that builds also run code compiled with these flags? The names of /proc/cpuinfo: -mamx-tile is
# amx_tile, and -march=...+dotprod+fp16 is asimddp and asimdhp.
function(kt_host_runs result)
  set(runs ON)
  string(REGEX REPLACE "-march=[^+;]*[+]" "+" features "${ARGN}")
  string(REPLACE "+" ";" features "${features}")
  foreach(feature IN LISTS features)
    string(REGEX REPLACE "^-m" "" feature "${feature}")
    string(REPLACE "-" "_" feature "${feature}")
    string(REGEX REPLACE "avx512(bf16|vnni)" "avx512_\\1" feature "${feature}")
    string(REGEX REPLACE "^avxvnni$" "avx_vnni" feature "${feature}")
    string(REGEX REPLACE "^dotprod$" "asimddp" feature "${feature}")
    string(REGEX REPLACE "^fp16$" "asimdhp" feature "${feature}")
    if(feature AND NOT kt_host_flags MATCHES " ${feature} ")
      set(runs OFF)
    endif()
  endforeach()
  set(${result} ${runs} PARENT_SCOPE)
endfunction()

function(kt_isa name architecture source)
  set(flags ${ARGN})
  set(emulated OFF)
  if(KT_EMULATE AND flags)
    kt_host_runs(native ${flags})
    if(NOT native OR NOT architecture STREQUAL KT_ARCHITECTURE)
      set(emulated ON)
    endif()
  elseif(NOT architecture STREQUAL "any" AND NOT architecture STREQUAL KT_ARCHITECTURE)
    return()
  elseif(KT_NATIVE)
    kt_host_runs(native ${flags})
    if(NOT native)
      return()
    endif()
  endif()

  set(target kt_isa_${name})
  add_library(${target} OBJECT csrc/kernels/${source})
  target_include_directories(${target} PRIVATE csrc)
  target_link_libraries(${target} PRIVATE kt_flags)
  # Products contract to FMA, in every compiler. No -ffast-math: NaN and infinity keep their meaning and sums keep the
  # order in which they are written.
  target_compile_options(${target} PRIVATE -ffp-contract=fast -fno-math-errno -fno-trapping-math -fno-exceptions)
  # gcc tunes for CPUs on which chains of FMA are slow by contracting some and not others: in gcc 13 in some instances of
  # a template for AVX2 and not in others, so that a row's bits depended on its neighbours.
  target_compile_options(${target} PRIVATE $<$<CXX_COMPILER_ID:GNU>:--param=avoid-fma-max-bits=0>)
  # Vectors wider than the variant's are passed between functions of one object alone.
  target_compile_options(${target} PRIVATE -Wno-psabi)
  # An emulated variant exists for tests: -O1 compiles four times as fast, and the emulated intrinsics are vectors anyway.
  if(emulated AND NOT KT_SANITIZE)
    target_compile_options(${target} PRIVATE -O1)
  elseif(NOT KT_SANITIZE)
    target_compile_options(${target} PRIVATE -O3)
  endif()
  if(emulated)
    # Without AVX2 none of them: then csrc/emulate/immintrin.h declares no intrinsics of the compiler, and code for F16C
    # would miss its own.
    kt_host_runs(has_avx2 -mavx2)
    if(has_avx2 AND architecture STREQUAL KT_ARCHITECTURE)
      foreach(flag IN LISTS flags)
        kt_host_runs(native ${flag})
        if(native)
          target_compile_options(${target} PRIVATE ${flag})
        endif()
      endforeach()
    endif()
    target_include_directories(${target} BEFORE PRIVATE csrc/emulate)
    target_compile_definitions(${target} PRIVATE KT_EMULATE)
  else()
    target_compile_options(${target} PRIVATE ${flags})
  endif()

  set(KT_ISA_NAMES ${KT_ISA_NAMES} ${name} PARENT_SCOPE)
  set_target_properties(${target} PROPERTIES EXCLUDE_FROM_ALL ON KT_EMULATED ${emulated})
endfunction()

# Adds the objects of the variants to kt_core, writes generated/isas.h, and checks what the objects export.
function(kt_link_isas)
  set(names ${KT_ISA_NAMES})
  list(LENGTH names count)
  if(KT_NATIVE AND NOT KT_EMULATE AND count GREATER 3)
    list(GET names 0 1 -1 names)
  endif()
  set(checks "")
  foreach(name IN LISTS names)
    set(target kt_isa_${name})
    get_target_property(emulated ${target} KT_EMULATED)
    target_sources(kt_core PRIVATE $<TARGET_OBJECTS:${target}>)
    string(APPEND KT_ISA_ROWS "KT_ISA_ROW(${name})\n")
    if(emulated)
      string(APPEND KT_ISA_EMULATED_ROWS "KT_ISA_EMULATED(${name})\n")
      message(STATUS "variant ${name}: emulated")
    else()
      message(STATUS "variant ${name}: native")
    endif()
    # Sanitizers add symbols of their own to every object.
    if(CMAKE_NM AND NOT KT_SANITIZE)
      set(stamp ${CMAKE_CURRENT_BINARY_DIR}/exports_${name}.checked)
      add_custom_command(
        OUTPUT ${stamp}
        COMMAND ${CMAKE_COMMAND} -DNM=${CMAKE_NM} -DNAME=${name} -DOBJECT=$<TARGET_OBJECTS:${target}> -DSTAMP=${stamp}
                -P ${CMAKE_CURRENT_SOURCE_DIR}/cmake/check_exports.cmake
        DEPENDS ${target} $<TARGET_OBJECTS:${target}> cmake/check_exports.cmake
        COMMENT "Checking that ${name} exports only its table"
        VERBATIM)
      list(APPEND checks ${stamp})
    endif()
  endforeach()
  configure_file(cmake/isas.h.in generated/isas.h @ONLY)
  add_custom_target(kt_isa_exports DEPENDS ${checks})
  add_dependencies(kt_core kt_isa_exports)
endfunction()
