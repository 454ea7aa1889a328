import { expect, test } from 'vitest'
import type { TrainingJob } from '../src/contract'
import { resumeWords } from '../src/model/rehearsal'

type Result = NonNullable<TrainingJob['RehearsalResult']>

const result = (changes: Partial<Result>): Pick<TrainingJob, 'RehearsalResult' | 'IsRehearsalPending'> => ({
  RehearsalResult: { Verdict: 'Proven', Step: 1200, Steps: 5, Seconds: 12, Time: 0, ...changes },
  IsRehearsalPending: false,
})

test('a job without a rehearsal, and an answer of an older server, have no line', () => {
  expect(resumeWords({ IsRehearsalPending: false })).toBeUndefined()
  expect(resumeWords({})).toBeUndefined()
  expect(resumeWords({ IsRehearsalPending: true })).toBe('A rehearsal is pending.')
})

test('a proof names its step and its time', () => {
  expect(resumeWords(result({}))).toBe('Resume proven at step 1,200, in 12 s.')
  expect(resumeWords({ ...result({}), IsRehearsalPending: true })).toBe(
    'Resume proven at step 1,200, in 12 s. A further rehearsal is pending.',
  )
})

test('a job whose ranks never rehearsed says why', () => {
  const found = result({ Verdict: 'Refused', Message: 'the job ended' })
  expect(resumeWords(found)).toBe('The job has rehearsed no restart until step 1,200. The job ended.')
})

test.each([
  ['Unproven', 'Rank 3 repeats its steps after a restart from step 1,200, and loses values of the script.'],
  ['Differs', 'Rank 3 differs after a restart from step 1,200.'],
  ['Unstable', 'Rank 3 is not deterministic after a restart from step 1,200.'],
  ['Refused', 'Rank 3 could not rehearse a restart from step 1,200.'],
] as const)('%s names the rank, the message and the advice', (Verdict, words) => {
  const found = result({ Verdict, Rank: 3, Message: 'the loss differs', Advice: 'Register it.' })
  expect(resumeWords(found)).toBe(`${words} The loss differs. Register it.`)
  expect(resumeWords(result({ Verdict, Rank: 3 }))).toBe(words)
})
