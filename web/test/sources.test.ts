/** Rules for the sources of the dashboard that no compiler checks. */
import { globSync, readFileSync } from 'node:fs'
import { join } from 'node:path'

import { describe, expect, test } from 'vitest'

const SRC = join(import.meta.dirname, '../src')
const SOURCES = globSync('**/*.{ts,tsx}', { cwd: SRC }).filter((file) => file !== 'contract.ts')
const linesOf = (file: string) => readFileSync(join(SRC, file), 'utf8').split('\n')

/** Fields of the API from which `model/figures.ts` derives what pages show. */
const DERIVED = /\b(?:ProtectionState|LostSteps|HealthyNodeCount)\b/
const readersIn = (lines: readonly string[]): string[] => lines.filter((line) => DERIVED.test(line))

describe('a field that needs a derivation', () => {
  test('is read by model/figures.ts only', () => {
    const others = SOURCES.filter((file) => file !== 'model/figures.ts')
    expect(others.filter((file) => readersIn(linesOf(file)).length)).toEqual([])
    expect(readersIn(linesOf('model/figures.ts')).length).toBeGreaterThan(3)
  })
  test('is found where another module reads it', () => {
    expect(readersIn(['if (job.ProtectionState)', 'const { LostSteps } = each', 'job.Protection'])).toHaveLength(2)
  })
})

/** Return the classes that a style sheet styles outside of media queries, without another selector. */
const classesIn = (css: string): string[] => [...css.matchAll(/^\.([\w-]+) \{/gm)].map((found) => found[1]!)

test('one file styles a class, because the order of lazily loaded files is not fixed', () => {
  const files = globSync('styles/*.css', { cwd: SRC })
  const styled = files.flatMap((file) => [...new Set(classesIn(linesOf(file).join('\n')))])
  expect(styled.filter((name, index) => styled.indexOf(name) !== index)).toEqual([])
  expect(classesIn('.a { }\n.a li { }\n  .b { }\n.c { }')).toEqual(['a', 'c'])
})
