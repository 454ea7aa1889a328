// @vitest-environment jsdom
/** Tags and notes that people add to a job, cloning a job, and browser notifications. */
import { act, fireEvent, screen, waitFor, within } from '@testing-library/react'
import { afterEach, describe, expect, test, vi } from 'vitest'

import type { TrainingJob, TrainingJobSummary } from '../src/contract'
import SubmitPage from '../src/pages/Submit'
import { JobButtons } from '../src/parts/JobButtons'
import JobPeople from '../src/parts/JobPeople'
import { NotificationSettings } from '../src/parts/NotificationSettings'
import Notifier from '../src/parts/Notifier'
import { isNotifying, setWatching } from '../src/parts/watching'
import { drawn, served } from './drawn'

const NOW = Math.floor(Date.now() / 1000)
const job = {
  TrainingJobName: 'gpt',
  RunId: 'run',
  FleetName: 'main',
  TrainingJobStatus: 'InProgress',
  Tags: { team: 'vision', area: 'x' },
}
const summary = (RunId: string, changes: Partial<TrainingJobSummary> = {}) =>
  ({
    TrainingJobName: `job ${RunId}`,
    RunId,
    Project: 'default',
    SecondaryStatus: 'Training',
    TrainingJobStatus: 'InProgress',
    Reason: '',
    Boundary: 9,
    ...changes,
  }) as TrainingJobSummary
const failed = (RunId: string, changes: Partial<TrainingJobSummary> = {}) =>
  summary(RunId, {
    SecondaryStatus: 'Failed',
    TrainingJobStatus: 'Failed',
    Duty: { Kind: 'JobFailed', Urgency: 'Now', Sentence: 'Act now: correct the cause.', Actions: [] },
    ...changes,
  })

afterEach(() => setWatching({ isOn: false, runIds: new Set() }))

describe('the tags and notes of a job', () => {
  const part = (changes: object = {}, role?: string) =>
    drawn(<JobPeople job={{ ...job, ...changes } as unknown as TrainingJob} />, {
      role,
      answers: { '["notes","run"]': [{ NoteId: 1, Author: 'ann', CreationTime: NOW, Text: 'a baseline' }] },
    })
  test('a tag is added to the others, and removed', async () => {
    const asked = served({ '/v1/training-jobs/run': { body: {} } })
    part()
    screen.getByText('a baseline')
    fireEvent.change(screen.getByRole('textbox', { name: 'Key of the new tag' }), { target: { value: ' owner ' } })
    fireEvent.change(screen.getByRole('textbox', { name: 'Value of the new tag' }), { target: { value: 'bob' } })
    fireEvent.click(screen.getByRole('button', { name: 'Add tag' }))
    fireEvent.click(screen.getByRole('button', { name: 'Remove the tag area' }))
    await waitFor(() => expect(asked.filter(({ method }) => method === 'POST')).toHaveLength(2))
    expect(asked.filter(({ method }) => method === 'POST').map(({ body }) => body)).toEqual([
      { Tags: { area: 'x', team: 'vision', owner: 'bob' } },
      { Tags: { team: 'vision' } },
    ])
  })
  test('an ended job keeps its tags and takes notes; a viewer changes nothing', () => {
    part({ TrainingJobStatus: 'Completed' })
    expect(screen.queryByRole('button', { name: /tag/ })).toBeNull()
    screen.getByRole('button', { name: 'Add note' })
  })
  test('a viewer changes nothing', () => {
    part({}, 'viewer')
    expect(screen.queryByRole('button')).toBeNull()
  })
})

test('a job is cloned and watched from its page', () => {
  drawn(<JobButtons job={{ RunId: 'run' }} />)
  expect(screen.getByRole('link', { name: 'Clone' }).getAttribute('href')).toBe('/submit?from=run')
  fireEvent.click(screen.getByRole('button', { name: 'Watch' }))
  fireEvent.click(screen.getByRole('button', { name: 'Stop watching' }))
  screen.getByRole('button', { name: 'Watch' })
})

test('a job in the trash can be taken out', () => {
  drawn(<JobButtons job={{ RunId: 'run', PurgeTime: 1 }} />)
  screen.getByRole('button', { name: 'Undelete' })
})

test('the form of a clone has the settings of its job, and no name', async () => {
  const body = { ...job, EntryPoint: 'fit.py', NodeCount: 7, Source: { SourceId: 'a'.repeat(64) } }
  served({ '/v1/training-jobs/run': { body } })
  drawn(<SubmitPage />, { at: '/submit?from=run', answers: { '["fleets"]': [], '["jobs"]': [] } })
  await waitFor(() => expect(screen.getByRole('textbox', { name: /Entry point/ })).toHaveProperty('value', 'fit.py'))
  expect(screen.getByRole('textbox', { name: /^Name/ })).toHaveProperty('value', '')
  screen.getByText(/the code and the settings of gpt/)
})

describe('notifications', () => {
  const shown: [string, NotificationOptions | undefined][] = []
  class Browser {
    static permission = 'default'
    static requestPermission = vi.fn(() => Promise.resolve(Browser.permission))
    onclick?: () => void
    constructor(title: string, options?: NotificationOptions) {
      shown.push([title, options])
    }
  }
  const setUp = (permission: string) => {
    shown.length = 0
    Browser.permission = permission
    vi.stubGlobal('Notification', Browser)
    vi.stubGlobal('isSecureContext', true)
  }

  test('are opt-in, and a refusal by the browser is explained', async () => {
    setUp('denied')
    drawn(<NotificationSettings />)
    const card = within(screen.getByRole('region', { name: 'Notifications' }))
    card.getByText('Off in this browser.')
    fireEvent.click(card.getByRole('button', { name: 'Notify me' }))
    await waitFor(() => card.getByRole('alert'))
    card.getByText('Off in this browser.')
    Browser.permission = 'granted'
    fireEvent.click(card.getByRole('button', { name: 'Notify me' }))
    await waitFor(() => card.getByText('On in this browser.'))
    expect(card.queryByRole('alert')).toBeNull()
  })
  test('are shown when a watched job begins to need a person', async () => {
    setUp('granted')
    const answers = { '["jobs"]': [summary('a'), failed('b')] }
    const { client } = drawn(<Notifier runIds={new Set(['a', 'b'])} />, { answers })
    expect(shown).toEqual([])
    act(() => client.setQueryData(['jobs'], [failed('a'), failed('b')]))
    await waitFor(() => expect(shown.map(([title]) => title)).toEqual(['job a needs you now']))
    act(() =>
      client.setQueryData(
        ['jobs'],
        [failed('a'), failed('b')].map((each) => ({ ...each })),
      ),
    )
    expect(shown).toHaveLength(1)
  })
  test('need the choice of a person, the permission of the browser, and a watched job', () => {
    const runIds = new Set(['a'])
    setUp('default')
    expect(isNotifying({ isOn: true, runIds })).toBe(false)
    setUp('granted')
    expect(isNotifying({ isOn: true, runIds })).toBe(true)
    expect(isNotifying({ isOn: false, runIds })).toBe(false)
    expect(isNotifying({ isOn: true, runIds: new Set() })).toBe(false)
  })
})
