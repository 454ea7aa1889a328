/** How far a job is, and how long the rest takes. */
import { expect, test } from 'vitest'

import { done, left } from '../src/model/progress'

const NOW = 1_800_000_000 // 2027-01-15 08:00:00 UTC
const job = { Boundary: 250, TargetStep: 1000, EstimatedRemainingSeconds: 5400, SecondaryStatus: 'Training', TrainingJobStatus: 'InProgress' } as const

test.each([[250, 1000, 0.25], [-1, 1000, 0], [1001, 1000, 1], [250, undefined, undefined]])('step %s of %s is %s of it', (Boundary, TargetStep, ratio) => expect(done({ Boundary, TargetStep })).toBe(ratio))
test('while it trains there is a moment, on the day or beyond', () => {
  expect(left(job, NOW)).toBe('1 h 30 min, until 09:30 UTC if nothing fails')
  expect(left({ ...job, EstimatedRemainingSeconds: 3 * 86_400 }, NOW)).toMatch(/, until 2027-01-18 if nothing fails$/)
})
test('while it does not train there is none', () => expect(left({ ...job, SecondaryStatus: 'Restarting' }, NOW)).toBe('1 h 30 min of training'))
test('nothing is guessed', () => {
  expect(left({ ...job, TargetStep: undefined }, NOW)).toMatch(/the script has not said/)
  expect(left({ ...job, EstimatedRemainingSeconds: undefined }, NOW)).toBe('not known yet')
  expect(left({ ...job, TrainingJobStatus: 'Completed' }, NOW)).toBe('–')
})
