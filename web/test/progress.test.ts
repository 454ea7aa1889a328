/** The page shows how much time remains at the pace so far. */
import { expect, test } from 'vitest'

import { remainingWords } from '../src/model/progress'

const NOW = 1_800_000_000 // 2027-01-15 08:00:00 UTC
const job = {
  Boundary: 250,
  TargetStep: 1000,
  EstimatedRemainingSeconds: 5400,
  SecondaryStatus: 'Training',
  TrainingJobStatus: 'InProgress',
} as const

test('while it trains there is a moment, on the day or beyond', () => {
  expect(remainingWords(job, NOW)).toBe('1 h 30 min, until 09:30 UTC without failures')
  expect(remainingWords({ ...job, EstimatedRemainingSeconds: 3 * 86_400 }, NOW)).toMatch(
    /, until 2027-01-18 without failures$/,
  )
})
test('while it does not train there is none', () =>
  expect(remainingWords({ ...job, SecondaryStatus: 'Restarting' }, NOW)).toBe('1 h 30 min of training'))
test('an unknown time stays unknown', () => {
  expect(remainingWords({ ...job, TargetStep: undefined }, NOW)).toMatch(/the script sets no target step/)
  expect(remainingWords({ ...job, EstimatedRemainingSeconds: undefined }, NOW)).toBe('not known yet')
  expect(remainingWords({ ...job, TrainingJobStatus: 'Completed' }, NOW)).toBe('–')
})
