import '@mantine/core/styles/Menu.css'
import { Menu, useMantineColorScheme } from '@mantine/core'
import type { ReactElement } from 'react'
import { useNavigate } from 'react-router'

import { SETTINGS } from '../words/settings'

interface Props {
  onClose: () => void
  onSignOut: () => void
  /** The button that opens the menu. */
  children: ReactElement
}

/** The menu of the account button: theme, settings, sign out. */
export default function AccountMenu({ onClose, onSignOut, children }: Props) {
  const navigate = useNavigate()
  const { colorScheme, setColorScheme } = useMantineColorScheme()
  const words = SETTINGS.theme
  return (
    <Menu opened position="bottom-end" withinPortal onClose={onClose}>
      <Menu.Target>{children}</Menu.Target>
      <Menu.Dropdown>
        <Menu.Label>{words.title}</Menu.Label>
        {(['auto', 'light', 'dark'] as const).map((scheme) => (
          <Menu.Item
            key={scheme}
            onClick={() => setColorScheme(scheme)}
            aria-current={colorScheme === scheme || undefined}
          >
            {words[scheme]}
            {colorScheme === scheme ? ' ✓' : ''}
          </Menu.Item>
        ))}
        <Menu.Divider />
        <Menu.Item onClick={() => void navigate('/settings')}>{SETTINGS.menu.settings}</Menu.Item>
        <Menu.Item onClick={onSignOut}>{SETTINGS.menu.signOut}</Menu.Item>
      </Menu.Dropdown>
    </Menu>
  )
}
